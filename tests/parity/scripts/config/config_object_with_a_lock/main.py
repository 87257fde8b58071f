import torch
from torch.utils.data import DataLoader
from parity import show
from config import cfg


class D(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.ones(cfg.size) * i


cfg.set(size=6)
for b in DataLoader(D(), batch_size=2, num_workers=2):
    show(b)
