"""A dataset that prints what it makes."""

from __future__ import annotations

import os
import sys

import torch
from fault_data import Slow


class Loud(Slow):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, float, int]:
        sys.stdout.write(f"making {i}\n")
        os.write(2, f"native {i}\n".encode())
        return super().__getitem__(i)
