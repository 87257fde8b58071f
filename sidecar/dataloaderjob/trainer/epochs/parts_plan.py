"""Decisions for `parts=`: how a batch is split into parts, and what is returned once the parts have arrived. This
module is pure.

A part consists of some of a batch's keys, with their place in the epoch. Its samples therefore have the same seeds as
in the whole batch. If user code fails in a part, or parts cannot be merged, one feeder is asked for the whole batch.
Its answer, even if it is an error, is the same as without `parts=`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from dataloaderjob.core.control import MOST_AHEAD
from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.trainer.epochs.merging import NotMergedError, merged


class PartedBatch(NamedTuple):
    """A requested batch."""

    keys: Sequence[Any]
    position: int
    """Number of samples in the epoch before this batch."""
    counts: tuple[int, ...]
    """Number of samples in each part of the batch."""

    def parts(self) -> list[tuple[int, Sequence[Any]]]:
        """Returns the position and the keys of each part."""
        ends = [0]
        for count in self.counts:
            ends.append(ends[-1] + count)
        return [(self.position + begin, self.keys[begin:end]) for begin, end in pairwise(ends)]


class VerdictKind(Enum):
    """Ways to respond once all parts of a batch have arrived."""

    GIVE = auto()
    """Return the merged batch."""
    RAISE = auto()
    """Raise the error of a part."""
    REMAKE = auto()
    """Ask one feeder for the whole batch."""


class PartsVerdict(NamedTuple):
    """The decision about a batch, once all its parts have arrived."""

    kind: VerdictKind
    batch: Any = None
    error: Exception | None = None
    note: str = ""
    """Message that tells the user that batches are no longer split."""


class PartsPlan:
    """The requested batches of one epoch. `most` is the maximum number of parts of a batch. A batch with fewer samples
    has one part per sample."""

    __slots__ = ("_asked", "handled", "last", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        self._asked: deque[PartedBatch] = deque()
        self.last: PartedBatch | None = None
        """The batch that was returned last."""
        self.handled = 0
        """Number of tickets used by the batches returned so far; -1 while a batch is about to be returned."""

    def window(self, batches: int) -> int:
        """Returns the number of batches that may be outstanding: `batches`, or fewer if their parts would not fit into
        a stream."""
        return max(1, min(batches, MOST_AHEAD // self.most))

    @property
    def next(self) -> PartedBatch | None:
        """The batch to return next, if one was requested."""
        return self._asked[0] if self._asked else None

    def split(self, keys: Any, position: int) -> PartedBatch:
        """Splits a batch into parts whose sizes differ by at most one sample. Copies `keys`, because the sampler may
        reuse that object for its next batch."""
        samples = len(keys)
        parts = max(1, min(self.most, samples))
        keys = keys.clone() if isinstance(keys, torch.Tensor) else copy.copy(keys)
        if not isinstance(keys, np.ndarray | torch.Tensor | tuple):
            keys = list(keys)
        ends = pairwise(samples * part // parts for part in range(parts + 1))
        return PartedBatch(keys, position, tuple(end - begin for begin, end in ends))

    def asks(self, batch: PartedBatch) -> None:
        """Records that all parts of the batch were requested."""
        self._asked.append(batch)

    def judge(self, answers: Sequence[Any]) -> PartsVerdict:
        """Returns the decision about the next batch. `answers` holds the batches made from its parts, or errors in
        their place."""
        error = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if error is not None:
            # A request for the whole batch could kill another process, or take as long again.
            is_final = len(answers) == 1 or isinstance(error, DataLoaderJobError)
            return (
                PartsVerdict(VerdictKind.RAISE, error=error) if is_final else PartsVerdict(VerdictKind.REMAKE)
            )
        if len(answers) == 1:
            return PartsVerdict(VerdictKind.GIVE, answers[0])
        try:
            return PartsVerdict(VerdictKind.GIVE, merged(answers, self._asked[0].counts))
        except NotMergedError as exc:
            if not exc.is_final:
                return PartsVerdict(VerdictKind.REMAKE)
            self.most = 1
            note = f"batches cannot be put together from parts ({exc}): one feeder makes each batch, as without parts="
            return PartsVerdict(VerdictKind.REMAKE, note=note)

    def passes(self) -> None:
        """Removes the next batch, which is about to be returned. The caller sets `last` and `handled` when it returns
        the batch."""
        self.handled = -1
        self._asked.popleft()
