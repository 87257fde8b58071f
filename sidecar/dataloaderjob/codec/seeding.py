"""Seeds the generators that user code draws from: `random`, numpy's legacy one, torch's default one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.worker import _generate_state

from dataloaderjob.codec import seeds

# Not torch.manual_seed, which also visits the accelerators: 150 to 180 µs, this 1.2.
_seed_torch = torch.default_generator.manual_seed
_seed_numpy = np.random.seed
_seed_random = random.seed
_INT64 = (1 << 63) - 1


def seed_generators(seed: int) -> None:
    """Seeds all three from a seed below 2**64; 8 µs.

    numpy takes the upper half and torch (which uses no more than 32 bits) the lower: both are Mersenne
    twisters seeded alike, and would give the same stream from the same half. What `torch.initial_seed()` then
    tells fits an int64, as with torch, so that a sample may return it.
    """
    _seed_random(seed)
    _seed_numpy(seed >> 32)
    _seed_torch(seed & _INT64)


def seed_worker(seed: int, number: int) -> None:
    """Seeds as torch seeds worker `number` for worker_init_fn: by `seed + number`, its `get_worker_info().seed`."""
    _seed_random(seed + number)
    _seed_torch((seed + number) & _INT64)
    _seed_numpy(_generate_state(seed, number))  # type: ignore[no-untyped-call]


def seed_sample(base_seed: int, position: int, key: Any) -> None:
    """Seeds before `dataset[key]`. `position` counts samples from the start of the iterator."""
    seed_generators(seeds.of_sample(base_seed, position, key))


def seed_batch(base_seed: int, ticket_no: int) -> None:
    """Seeds before `__getitems__`, and again before collate_fn."""
    seed_generators(seeds.of_batch(base_seed, ticket_no))


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leaves the caller's three generators as they were, and runs torch with one thread meanwhile.

    One thread, because sums differ with the number of threads. About 100 µs.
    """
    threads = torch.get_num_threads()
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
