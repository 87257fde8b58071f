"""A trainer that iterates until it is killed and tells the digest of every few batches: python live_trainer.py RANK."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from fault_data import Slow

from dataloaderjob import DataLoader
from dataloaderjob.batches.digest import digest_update

SAMPLES, BATCH, TOLD = 800, 8, 10
PAUSE_S = 0.004


def epochs(rank: int, *, pause_s: float = PAUSE_S, **options: Any) -> Iterator[tuple[str, float]]:
    """One epoch after another, all alike: the digest of each TOLD batches, and the longest wait for one of them."""
    generator = torch.Generator()
    loader = DataLoader(
        Slow(SAMPLES, pause_s), batch_size=BATCH, shuffle=True, generator=generator, **options
    )
    while True:
        generator.manual_seed(rank)
        batches = iter(loader)
        for _ in range(SAMPLES // BATCH // TOLD):
            hasher, longest_s = hashlib.sha256(), 0.0
            for _ in range(TOLD):
                began = time.monotonic()
                batch = next(batches)
                longest_s = max(longest_s, time.monotonic() - began)
                digest_update(hasher, batch)
            yield hasher.hexdigest(), longest_s
        assert next(batches, None) is None


if __name__ == "__main__":
    for digest, longest_s in epochs(int(sys.argv[1])):
        sys.stdout.write(f"{digest} {longest_s:.3f}\n")
        sys.stdout.flush()
