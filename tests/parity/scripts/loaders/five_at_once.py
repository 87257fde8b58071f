import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __init__(self, power):
        self.power = power

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.tensor([i**self.power])


loaders = [DataLoader(Squares(p), batch_size=2, num_workers=1) for p in range(5)]
for epoch in range(2):
    for batches in zip(*loaders):
        show(torch.stack(batches).sum(0), batches[4])
