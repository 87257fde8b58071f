"""The part of a DataLoader that iterators, states and records may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from dataloaderjob.core.consumption import Consumption


class Iterated(Protocol):
    """Our DataLoader, as its iterators, its states and its records see it. They set nothing."""

    @property
    def dataset(self) -> Any: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def batch_sampler(self) -> Any: ...
    @property
    def drop_last(self) -> bool: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def generator(self) -> torch.Generator | None: ...
    @property
    def _index_sampler(self) -> Any: ...
    @property
    def collate_fn(self) -> Callable[[Any], Any]: ...
    @property
    def worker_init_fn(self) -> Callable[[int], Any] | None: ...
    @property
    def persistent_workers(self) -> bool: ...
    @property
    def _auto_collation(self) -> bool:
        """True if batches are made of samples, False if each key makes a batch."""

    @property
    def consumption(self) -> Consumption: ...
    @property
    def pickle_allowed(self) -> bool: ...
    @property
    def has_device_stage(self) -> bool: ...
    @property
    def tail(self) -> str | None: ...
    @property
    def stage(self) -> Callable[[Any], Any] | None: ...
    @property
    def parts(self) -> int | None: ...
    @property
    def device(self) -> Any: ...
    @property
    def device_stage(self) -> Callable[..., Any] | None: ...
    @property
    def prefetch_device(self) -> int: ...
    def way(self, *, pins: bool, pin_device: str | None) -> Any:
        """Returns the destination of batches."""

    def begin_epoch(self, *, again: bool = False) -> Any:
        """Begins the epoch of the next iterator, or of the same one (`again`)."""

    def begin_session(self) -> tuple[int, int]:
        """Numbers of this loader and of its next iterator."""

    def probes(self) -> list[str | None] | None:
        """Digests of three samples that a state knows the dataset by."""
