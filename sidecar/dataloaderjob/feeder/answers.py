"""The answers of a builder that makes a slot, kept for as long as they may be asked for again; and its snapshots.

A slot cannot go back. What was made and did not arrive, since a place in the pool was needed or a connection broke, is
sent again from the buffer that it lies in.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dataloaderjob.core.errors import UnsupportedBatch
from dataloaderjob.core.frames import MAX_SNAPSHOT_NBYTES
from dataloaderjob.feeder.channel import Kind
from dataloaderjob.making.slot_source import SlotSource

EVERY_S = 1.0
SHARE = 0.02
"""Most of a slot's time that its snapshots take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a builder says of one batch."""

    kind: Kind
    payload: bytes
    flags: int = 0
    buffer: int | None = None
    """Where the body lies."""


class Answers:
    """Those of one slot, by the batch's number in it."""

    def __init__(self, free: Callable[[int], None]) -> None:
        """`free(buffer)`: it is of no further use."""
        self._free = free
        self._of: dict[int, Answer] = {}
        self._lent: Counter[int] = Counter()
        """How often the feeder has each buffer."""

    def get(self, number: int) -> Answer | None:
        return self._of.get(number)

    def keep(self, number: int, answer: Answer) -> None:
        self._of[number] = answer

    def lend(self, answer: Answer) -> None:
        """The answer goes to the feeder."""
        if answer.buffer is not None:
            self._lent[answer.buffer] += 1

    def returned(self, buffer: int) -> None:
        """The feeder has sent a body, or given it up."""
        self._lent[buffer] -= 1
        self._free_unless_used(buffer)

    def forget(self, needed: int) -> None:
        """Batches before `needed` are not asked for again."""
        for number in [number for number in self._of if number < needed]:
            buffer = self._of.pop(number).buffer
            if buffer is not None:
                self._free_unless_used(buffer)

    def _free_unless_used(self, buffer: int) -> None:
        if self._lent[buffer] <= 0 and all(kept.buffer != buffer for kept in self._of.values()):
            del self._lent[buffer]
            self._free(buffer)


class Snapshots:
    """When a builder asks a slot for its state."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = 0.0
        self.stopped = False
        """No further one is taken."""

    def take(self, source: SlotSource) -> bytes | None:
        """A snapshot, if one is due and there is one; once `stopped`, why not."""
        began = self._clock()
        if self.stopped or began < self._due:
            return None
        try:
            snapshot = source.snapshot()
        except UnsupportedBatch as exc:
            self.stopped = True
            found = str(exc).partition(". Let ")[0].partition("batch[1]")[2]
            return f"state_dict(){found}, which needs allow_pickle=True to be kept".encode()
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
            return f"its state has {len(snapshot)} bytes, of which {mb} MiB are kept".encode()
        return snapshot

    def stop(self) -> None:
        self.stopped = True
