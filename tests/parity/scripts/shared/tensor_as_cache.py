import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __init__(self):
        self.filled = torch.zeros(6, dtype=torch.bool).share_memory_()

    def __len__(self):
        return 6

    def __getitem__(self, i):
        self.filled[i] = True
        return i


dataset = Cached()
for batch in DataLoader(dataset, batch_size=2, num_workers=2):
    pass
show(dataset.filled)
