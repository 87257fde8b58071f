import numpy as np
import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Types(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return type(i).__name__, int(i)


show(*DataLoader(Types(), batch_size=3, sampler=np.random.default_rng(0).permutation(6), num_workers=2))
show(*DataLoader(Types(), batch_size=3, sampler=torch.arange(6), num_workers=2))
show(*DataLoader(Types(), batch_size=3, sampler=np.arange(6, dtype=np.uint8).tolist(), num_workers=2))
