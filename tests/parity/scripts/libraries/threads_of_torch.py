import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Threads(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.get_num_threads()


for batch in DataLoader(Threads(), batch_size=2, num_workers=2):
    show(batch)
