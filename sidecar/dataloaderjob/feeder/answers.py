"""The answers of a builder that makes a slot, and the slot's snapshots. Answers are kept while they may be requested
again.

A slot cannot be rewound. A batch may fail to arrive, because a connection broke or its place in the pool was given to
another batch. It is then sent again from its buffer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dataloaderjob.core.errors import UnsupportedBatch
from dataloaderjob.core.frames import MAX_SNAPSHOT_NBYTES
from dataloaderjob.feeder.channel import MessageKind
from dataloaderjob.making.slot_source import SlotSource

EVERY_S = 1.0
SHARE = 0.02
"""Largest share of a slot's time that snapshots may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A builder's answer about one batch."""

    kind: MessageKind
    payload: bytes
    flags: int = 0
    buffer: int | None = None
    """The buffer that holds the body."""


class Answers:
    """The answers of one slot, by the number of the batch in the slot."""

    def __init__(self, free: Callable[[int], None]) -> None:
        """`free(buffer)`: called once a buffer is no longer used."""
        self._free = free
        self._of: dict[int, Answer] = {}
        self._lent: Counter[int] = Counter()
        """buffer -> number of times that it was sent to the feeder and has not been returned yet."""

    def get(self, number: int) -> Answer | None:
        return self._of.get(number)

    def keep(self, number: int, answer: Answer) -> None:
        self._of[number] = answer

    def lend(self, answer: Answer) -> None:
        """Records that the answer is about to be sent to the feeder."""
        if answer.buffer is not None:
            self._lent[answer.buffer] += 1

    def returned(self, buffer: int) -> None:
        """Records that the feeder has sent the body in this buffer, or has given it up."""
        self._lent[buffer] -= 1
        self._free_unless_used(buffer)

    def forget(self, needed: int) -> None:
        """Drops the answers about batches before `needed`, which are not requested again."""
        for number in [number for number in self._of if number < needed]:
            buffer = self._of.pop(number).buffer
            if buffer is not None:
                self._free_unless_used(buffer)

    def _free_unless_used(self, buffer: int) -> None:
        if self._lent[buffer] <= 0 and all(kept.buffer != buffer for kept in self._of.values()):
            del self._lent[buffer]
            self._free(buffer)


class SnapshotClock:
    """A clock that decides when a builder takes a snapshot of its slot."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = 0.0
        self.stopped = False
        """True once no more snapshots are taken."""

    def take(self, source: SlotSource) -> bytes | None:
        """Returns a snapshot if one is due. If no snapshots can be taken from now on, sets `stopped` and returns the
        reason, if one is known. Returns None in all other cases."""
        began = self._clock()
        if self.stopped or began < self._due:
            return None
        try:
            snapshot = source.snapshot()
        except UnsupportedBatch as exc:
            self.stopped = True
            found = str(exc).partition(". Let ")[0].partition("batch[1]")[2]
            return f"state_dict(){found}, which can be kept only with allow_pickle=True".encode()
        except Exception as exc:  # user code, and pickle
            self.stopped = True
            return f"its state cannot be kept ({type(exc).__name__}: {exc})".encode()
        if snapshot is None:
            self.stopped = True
            return None
        now = self._clock()
        self._due = now + max(EVERY_S, (now - began) / SHARE)
        if len(snapshot) > MAX_SNAPSHOT_NBYTES:
            self.stopped = True
            mb = MAX_SNAPSHOT_NBYTES >> 20
            return f"its state has {len(snapshot)} bytes, but at most {mb} MiB are kept".encode()
        return snapshot

    def stop(self) -> None:
        self.stopped = True
