"""A stage and the collate_fn that follows it, as a single collate_fn. This module has no expensive imports, because the
trainer's first import loads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

STAGE, COLLATE = "stage", "collate_fn"


@dataclass(frozen=True, slots=True)
class Staged:
    """The collate_fn of a loader with a stage. It runs the stage for each sample, then the user's own collate_fn.

    torch calls it if no feeder makes the batches, or if a framework rebuilds the loader. A StopIteration in the user's
    code becomes a RuntimeError, as in a generator, so that it cannot end a slot.
    """

    stage: Callable[[Any], Any]
    collate_fn: Callable[[Any], Any]
    is_bare: bool = False
    """True if samples are not batched, and arrive one by one."""

    def __call__(self, read: Any, before: Callable[[int], None] | None = None) -> Any:
        """Returns the batch. Calls `before` with a sample's position before the stage runs for that sample, and with -1
        before collate_fn."""
        made, what = [], STAGE
        try:
            for position, sample in enumerate([read] if self.is_bare else read):
                if before is not None:
                    before(position)
                made.append(self.stage(sample))
            what = COLLATE
            if before is not None:
                before(-1)
            return self.collate_fn(made[0] if self.is_bare else made)
        except StopIteration as exc:
            raise RuntimeError(f"{what} raised StopIteration") from exc


def unchanged(samples: Any) -> Any:
    """Returns the samples unchanged. This is the collate_fn for slots if the loader has a stage, and for samples that
    are inspected."""
    return samples
