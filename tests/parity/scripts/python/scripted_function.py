import warnings

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

warnings.simplefilter("ignore")


@torch.jit.script
def scale(x: torch.Tensor, by: float):
    return x * by


class Scaled(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return scale(torch.arange(3.0), float(i))


show(*DataLoader(Scaled(), batch_size=2, num_workers=2))
