import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Columns(Dataset):
    def __init__(self):
        self.x = torch.arange(10)

    def __len__(self):
        return 10

    def __getitem__(self, i):
        raise AssertionError("one by one")

    def __getitems__(self, indices):
        return list(self.x[indices].unbind())


show(*DataLoader(Columns(), batch_size=4, num_workers=2))
show(*DataLoader(Columns(), batch_size=4, num_workers=2, drop_last=True, shuffle=False))
