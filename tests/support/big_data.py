"""A dataset of one large array and one large tensor, both written to by user code."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch.utils.data import Dataset


class Big(Dataset):
    def __init__(self, nbytes: int) -> None:
        half = nbytes // 2
        self.array = np.ones(half // 8, dtype=np.int64)
        self.tensor = torch.ones(half // 4, dtype=torch.float32)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[int, float, int]:
        """Touches everything, and writes a little into both."""
        self.array[i] = 1
        self.tensor[i] = 1.0
        return int(self.array.sum()), float(self.tensor.sum()), os.getpid()
