import sys

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

FACTOR = 2


def flip(x):
    return x.flip(0)


def double(x):
    return x * FACTOR


def negate(x):
    return -x


class Named(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return 4

    def __getitem__(self, i):
        x = torch.arange(3.0) + i
        x = globals()[self.names[0]](x)
        x = eval(self.names[1])(x)
        return getattr(sys.modules[__name__], self.names[2])(x)


for batch in DataLoader(Named(["flip", "double", "negate"]), batch_size=2, num_workers=2):
    show(batch)
