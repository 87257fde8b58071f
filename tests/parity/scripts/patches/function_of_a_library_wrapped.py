import functools
import torch
from torch.utils.data import DataLoader
from parity import show

old = torch.nn.functional.pad


@functools.wraps(old)
def pad(x, p, mode="constant", value=-1.0):
    return old(x, p, mode, value)


torch.nn.functional.pad = pad


class D(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.nn.functional.pad(torch.ones(2) * i, (0, 1))


for b in DataLoader(D(), batch_size=2, num_workers=2):
    show(b)
