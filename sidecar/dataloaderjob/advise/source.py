"""The source of a loader's batches, taken from torch's iterator. A script may drop the iterator before the advice is
due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The parts of a loader from which its batches can be made."""

    dataset: Any
    index_sampler: Any
    """Yields lists of keys, or single keys if `is_batched` is False."""
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], Any] | None
    is_batched: bool
    workers: int
    batches: int | None
    """Number of batches of an epoch; None if unknown."""
    has_feeders: bool
    """True if the loader is this package's, so its batches already come from feeders."""

    @staticmethod
    def of(iterator: Any) -> Source:
        """Returns the source of one of torch's iterators, read from attributes that have had these names since torch
        1.2."""
        parts = vars(iterator)
        return Source(
            dataset=iterator._dataset,  # noqa: SLF001
            index_sampler=iterator._index_sampler,  # noqa: SLF001
            collate_fn=iterator._collate_fn,  # noqa: SLF001
            worker_init_fn=parts.get("_worker_init_fn"),
            is_batched=bool(iterator._auto_collation),  # noqa: SLF001
            workers=int(iterator._num_workers),  # noqa: SLF001
            batches=_batches(iterator),
            has_feeders=type(iterator).__module__.startswith("dataloaderjob."),
        )

    @property
    def batch_size(self) -> int | None:
        size = getattr(self.index_sampler, "batch_size", None)
        return size if type(size) is int else None


def _batches(iterator: Any) -> int | None:
    """Returns the number of batches of an iterator's epoch; None if unknown. Does not ask a user's sampler, whose
    `__len__` may draw random numbers."""
    from torch.utils.data import BatchSampler

    sampler = iterator._index_sampler  # noqa: SLF001
    innermost = sampler.sampler if type(sampler) is BatchSampler else sampler
    if not type(innermost).__module__.startswith("torch.utils.data."):
        return None
    try:
        return len(sampler)
    except Exception:  # an iterable dataset's sampler, or the user's dataset, has no length
        return None
