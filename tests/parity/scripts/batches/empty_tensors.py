import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Empty(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.zeros(0), torch.zeros(0, 5, dtype=torch.int16), torch.tensor(i)


show(*DataLoader(Empty(), batch_size=2, num_workers=2))
show(*DataLoader([], batch_size=2, num_workers=2), "nothing")
