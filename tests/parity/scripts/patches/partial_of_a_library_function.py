import functools

import torch
import torch.nn.functional as F  # noqa: N812
from parity import show
from torch.utils.data import DataLoader, Dataset

F.normalize = functools.partial(F.normalize, p=1.0)


class Vectors(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return F.normalize(torch.arange(4.0) + i, dim=0)


show(*DataLoader(Vectors(), batch_size=3, num_workers=2))
