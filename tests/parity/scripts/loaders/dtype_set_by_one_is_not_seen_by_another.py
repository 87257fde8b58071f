import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Doubles(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        torch.set_default_dtype(torch.float64)
        return torch.ones(2)


class Plain(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.ones(2)


show(*DataLoader(Doubles(), batch_size=2, num_workers=1))
show(*DataLoader(Plain(), batch_size=2, num_workers=1))
show(torch.get_default_dtype() is torch.float32)
