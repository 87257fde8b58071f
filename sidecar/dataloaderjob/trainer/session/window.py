"""The number of batches that a loader requests ahead."""

from __future__ import annotations

import os

from dataloaderjob.core.control import MOST_AHEAD
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.places import PREFETCH_VARIABLE
from dataloaderjob.trainer.session import service

LEAST_PREFETCH = 16
"""Minimum number of batches ahead if neither `prefetch_factor` nor the job sets a number."""
PER_WORKER = 2
"""torch's default `prefetch_factor`."""
MAX_PREFETCH = MOST_AHEAD


def window_of(factor: int | None, feeders: int) -> int:
    """Returns the number of batches that a loader requests ahead. `factor` is its `prefetch_factor`, and `feeders` is
    the number of feeders that it wants. Raises InputError if the number of batches is out of range."""
    if factor is not None:
        window = factor * feeders
        if factor == PER_WORKER:
            window = min(window, MAX_PREFETCH)
    else:
        window = service.number(PREFETCH_VARIABLE, 0)
        if not os.environ.get(PREFETCH_VARIABLE):
            window = min(max(LEAST_PREFETCH, PER_WORKER * feeders), MAX_PREFETCH)
    if not 1 <= window <= MAX_PREFETCH:
        raise InputError(
            f"between 1 and {MAX_PREFETCH} batches can be prefetched, got {window}: change prefetch_factor "
            f"* num_workers, or spec.loader.prefetch ({PREFETCH_VARIABLE})"
        )
    return window
