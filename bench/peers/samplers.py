"""Peers of B10: torch's samplers, which make a list of all indices at `iter()`, on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler

from bench.samplers import Case, measure


def _skip(sampler: Any, position: int) -> Iterator[int]:
    """Resumes as torch's StatefulDataLoader and others do for a sampler without a state."""
    return itertools.islice(iter(sampler), position, None)


def _of(new_sampler: Callable[[int], Any]) -> Callable[[Case], dict[str, Any]]:
    return lambda case: measure(new_sampler, _skip, case)


def _random(samples: int) -> Any:
    return RandomSampler(range(samples), generator=torch.Generator().manual_seed(0))


def _distributed(samples: int) -> Any:
    return DistributedSampler(range(samples), num_replicas=1, rank=0)  # type: ignore[arg-type]


PEERS = {"DistributedSampler": _of(_distributed), "RandomSampler": _of(_random)}
