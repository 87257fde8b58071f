import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Growing(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return torch.full((1 + (i * 7919) % 5000,), i), "x" * (i * 31 % 17)


for batch in DataLoader(Growing(), batch_size=1, num_workers=2):
    show(batch)
