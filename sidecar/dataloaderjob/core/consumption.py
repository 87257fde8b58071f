"""The rolling digest of what a loader gave: which batches, in which order, epoch after epoch. Pure.

Each batch brings eight bytes of its own (`core.digests`), and one that failed a mark of its error. They are folded in
the order in which next() gave them:

    rolling = rolling * FOLD + digest    of the epoch, from its number + 1
    total   = closed * FOLD + rolling    of all epochs; `closed` is the total of those before

Both modulo 2**64. FOLD is odd, so no difference is lost on the way, and two batches that change places change the sum.
The iterators fold by themselves: 0.1 µs for a line in next(), 0.3 for a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

FOLD = 0x9E37_79B9_7F4A_7C15
"""2**64 divided by the golden ratio, which has no pattern in its bits."""
MASK = (1 << 64) - 1
PROBING = 1 << 30
"""Number of a loader that makes samples for a state: nobody consumes them, so they are in no record and no metric."""


def fold(rolling: int, digest: int) -> int:
    return (rolling * FOLD + digest) & MASK


def error_mark(error: BaseException) -> int:
    """Stands in place of a digest where a batch failed: the error's type, not its text, which may name a process."""
    name = f"error {type(error).__module__}.{type(error).__qualname__}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class Consumption:
    """What one loader gave so far. Its iterators change `rolling`."""

    __slots__ = ("_goes_on", "_unreported", "closed", "epoch", "loader", "rolling")

    def __init__(self, loader: int = 0) -> None:
        self.loader = loader
        """Number of the loader among those that the process made: the same in each run of one script."""
        self.epoch = -1
        """Number of the epoch, among those of which something was taken; -1 before the first."""
        self.closed = 0
        """Total of the epochs before."""
        self.rolling = 0
        self._goes_on = False
        self._unreported = 0

    @property
    def counts(self) -> bool:
        """Whether it is of a loader of the script's."""
        return self.loader != PROBING

    @property
    def total(self) -> int:
        return fold(self.closed, self.rolling)

    def begin(self) -> int:
        """Begins an epoch, unless nothing was taken of the one that was begun last.

        Returns what the total grew by since it was told last, or since the last batch; modulo 2**64.
        """
        before, unreported = self.total, self._unreported
        if self._goes_on:
            self._goes_on = False
        elif self.epoch < 0 or self.rolling != self.epoch + 1:
            self.closed = before
            self.epoch += 1
            self.rolling = self.epoch + 1
        self._unreported = 0
        return (self.total - before + unreported) & MASK

    def state(self) -> list[int]:
        """What `restore` takes: epoch, closed, rolling."""
        return [self.epoch, self.closed, self.rolling]

    def restore(self, state: Sequence[int], *, goes_on: bool) -> None:
        """Goes on from where another process was. `goes_on`: the next iterator is in the middle of that epoch."""
        before = self.total
        self.epoch, self.closed, self.rolling = state
        self._goes_on = goes_on
        self._unreported = (self._unreported + self.total - before) & MASK
