"""A dataset whose samples have ids, seeded bytes and random augmentation, slow enough to be hit by a fault."""

from __future__ import annotations

import hashlib
import random
import time

import numpy as np
import torch
from torch.utils.data import Dataset

from dataloaderjob.batches.digest import digest_update


class Slow(Dataset):
    def __init__(self, samples: int = 2400, pause_s: float = 0.0015) -> None:
        self.samples, self.pause_s = samples, pause_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[torch.Tensor, float, int]:
        time.sleep(self.pause_s)
        noise = torch.rand(32, 32) + float(np.random.rand())
        return noise + i, random.random(), i


def digest_of(loader, on_wait=None, before=None) -> str:
    """Digest of all batches in order; `on_wait` hears how long each took, `before` runs before each."""
    hasher = hashlib.sha256()
    iterator = iter(loader)
    number = 0
    while True:
        if before is not None:
            before(number)
        began = time.monotonic()
        try:
            batch = next(iterator)
        except StopIteration:
            return hasher.hexdigest()
        if on_wait is not None:
            on_wait(time.monotonic() - began)
        digest_update(hasher, batch)
        number += 1
