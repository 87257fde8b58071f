import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Products(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


loader = DataLoader(Products(), batch_size=2, num_workers=1)
with torch.autocast("cpu"):
    show(*loader)
show(*loader)
