"""The arguments of a loader at the beginning of an epoch. Iterators, states and records read nothing else from the
loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dataloaderjob.core.consumption import Consumption


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EpochSpec:
    """The arguments of one loader. The names are torch's, except where a docstring follows."""

    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    index_sampler: Any
    """The batch sampler or, if `bare`, the sampler."""
    drop_last: bool
    num_workers: int
    generator: torch.Generator | None
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], Any] | None
    persistent_workers: bool
    bare: bool
    """True if each key makes a batch, False if batches are collated from samples."""
    tail: str | None
    stage: Callable[[Any], Any] | None
    parts: int | None
    pickle_allowed: bool
    """True if batches may contain pickles."""
    consumption: Consumption
    """The loader's digest, which its iterators update."""
