"""A day of an endless stream in twenty minutes: `python -m bench.soak [--minutes M]`. Memory has to stay flat.

The stream is an endless IterableDataset whose iterator has a state. It is taken as fast as it arrives: in twenty
minutes the batches of a day at some 50 a second. The memory (proportional set size) of the trainer, of the sidecar
with its receiver, and of the feeders is printed forty times. The exit code is 1 if the median of the last quarter is
more than 8 % and 8 MB above the median of the second quarter for any of them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from bench.service import Service, service
from bench.stats import median

SHARE, NBYTES = 0.08, 8_000_000
"""Allowed growth of each, for allocators and caches."""
SLOTS = 2


class Endless(torch.utils.data.IterableDataset[Any]):
    """Increasing numbers that start with the worker's, each with random values."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None, "slots are made by feeders"
        return _Numbers(info.id, info.num_workers)


class _Numbers:
    def __init__(self, at: int, step: int) -> None:
        self._at, self._step = at, step

    def __iter__(self) -> _Numbers:
        return self

    def __next__(self) -> dict[str, Any]:
        self._at += self._step
        return {"id": self._at - self._step, "x": torch.rand(64)}

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def memory(running: Service) -> dict[str, float]:
    """Returns proportional set sizes by kind of process, in bytes."""
    here, node = os.getpid(), running.on_trainer_node()
    found: dict[str, float] = {}
    for process in [*psutil.Process(here).children(recursive=True), psutil.Process(here)]:
        try:
            nbytes = process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        kind = "trainer" if process.pid == here else "sidecar" if process.pid in node else "feeders"
        found[kind] = found.get(kind, 0.0) + nbytes
    return found


def grown(samples: list[dict[str, float]]) -> list[str]:
    """Returns a line for each kind of process that has grown."""
    quarter = max(1, len(samples) // 4)
    found = []
    for kind in samples[-1]:
        before = median([sample[kind] for sample in samples[quarter : 2 * quarter]])
        after = median([sample[kind] for sample in samples[-quarter:]])
        if after - before > max(NBYTES, SHARE * before):
            found.append(f"{kind} grew from {before / 1e6:.1f} to {after / 1e6:.1f} MB")
    return found


def soaked(running: Service, minutes: float) -> list[dict[str, float]]:
    """Takes the stream for `minutes` minutes, and returns the measurements."""
    from dataloaderjob import DataLoader

    loader = DataLoader(Endless(), batch_size=8, num_workers=SLOTS)
    samples: list[dict[str, float]] = []
    began, every_s = time.monotonic(), max(1.0, minutes * 60 / 40)
    for number, batch in enumerate(loader):
        first, expected = int(batch["id"][0]), (number // SLOTS * 8) * SLOTS + number % SLOTS
        if first != expected:
            raise RuntimeError(f"batch {number} begins with {first}, expected {expected}")
        elapsed_s = time.monotonic() - began
        if elapsed_s >= every_s * (len(samples) + 1):
            loader.state_dict()
            samples.append(memory(running))
            shown = ", ".join(f"{kind} {nbytes / 1e6:.1f} MB" for kind, nbytes in sorted(samples[-1].items()))
            print(f"{elapsed_s / 60:5.1f} min, {number + 1:,} batches: {shown}", flush=True)
        if elapsed_s > minutes * 60:
            break
    return samples


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    minutes = parser.parse_args(arguments).minutes
    with service(feeders=SLOTS, shared_memory_nbytes=256_000_000, prefetch=16) as running:
        found = grown(soaked(running, minutes))
    print("\n".join(found) or "flat: nothing grew", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
