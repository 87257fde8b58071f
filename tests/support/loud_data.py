"""A dataset that prints what it makes."""

from __future__ import annotations

import os
import sys
import time

import torch
from fault_data import Slow


class Loud(Slow):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, float, int]:
        when = (
            time.monotonic_ns()
        )  # of the two lines of one making; on a busy machine a batch may be made again
        sys.stdout.write(f"making {i} at {when}\n")
        os.write(2, f"native {i} at {when}\n".encode())
        return super().__getitem__(i)
