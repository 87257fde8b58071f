"""The rolling digest of a loader's output: which batches it returned, in which order, over all epochs. Pure.

Each batch contributes its own eight-byte digest (`core.digests`). A failed batch contributes a mark of its error
instead. Digests and marks are folded in the order in which next() returned the batches:

    rolling = rolling * FOLD + digest    of the epoch, starting at its number + 1
    total   = closed * FOLD + rolling    of all epochs; `closed` is the total of the earlier ones

Both are modulo 2**64. FOLD is odd, so no difference is lost in later steps, and swapping two batches changes the
result. Iterators fold inline, because an inline statement in next() takes 0.1 µs, and a call takes 0.3 µs.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

FOLD = 0x9E37_79B9_7F4A_7C15
"""2**64 divided by the golden ratio. Its bits have no pattern."""
MASK = (1 << 64) - 1
PROBING = 1 << 30
"""Number of a loader that makes samples only to obtain a state. Nobody consumes these samples, so no record or metric
includes them."""


def fold(rolling: int, digest: int) -> int:
    return (rolling * FOLD + digest) & MASK


def error_mark(error: BaseException) -> int:
    """Returns the mark that replaces the digest of a failed batch. It covers the error's type, not the error's text,
    which may name a process."""
    name = f"error {type(error).__module__}.{type(error).__qualname__}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class Consumption:
    """The digests of one loader's output so far. The loader's iterators update `rolling`."""

    __slots__ = ("_goes_on", "_unreported", "closed", "epoch", "loader", "rolling")

    def __init__(self, loader: int = 0) -> None:
        self.loader = loader
        """Number of the loader among those that the process created. It is the same in each run of the same script."""
        self.epoch = -1
        """Number of the epoch, counting only epochs from which batches were taken, or -1 before the first one."""
        self.closed = 0
        """Total of the previous epochs."""
        self.rolling = 0
        self._goes_on = False
        self._unreported = 0

    @property
    def counts(self) -> bool:
        """True if this is one of the script's own loaders."""
        return self.loader != PROBING

    @property
    def total(self) -> int:
        return fold(self.closed, self.rolling)

    def begin(self) -> int:
        """Begins an epoch, unless no batch was taken from the current one.

        Returns the change of the total that has not been reported yet, modulo 2**64. It includes changes by earlier
        calls of `restore`.
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
        """Returns the state for `restore`: epoch, closed, rolling."""
        return [self.epoch, self.closed, self.rolling]

    def restore(self, state: Sequence[int], *, goes_on: bool) -> None:
        """Resumes from another process's state. With `goes_on`, the next iterator continues in the middle of the
        epoch."""
        before = self.total
        self.epoch, self.closed, self.rolling = state
        self._goes_on = goes_on
        self._unreported = (self._unreported + self.total - before) & MASK
