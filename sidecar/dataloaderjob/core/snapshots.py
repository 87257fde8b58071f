"""Snapshots of one slot of an IterableDataset: points from which the slot can resume. Pure."""

from __future__ import annotations

from collections.abc import Iterable

MAX_SNAPSHOTS = 16
"""Maximum number of snapshots kept for one slot, because a feeder may send any number."""
STEPS_APART = 2
"""Ranks that share slots advance together, always fewer than STEPS_APART steps apart."""
STEPS_AHEAD, BATCHES_AHEAD = 4, 16
"""A shared slot may be ahead of the slowest rank by the batches of STEPS_AHEAD steps, plus BATCHES_AHEAD. A rank's
requests may be ahead by one step less. So no rank waits for a batch that will not be made."""
Snapshot = tuple[int, bytes]
"""(batches made, state)."""
DATA, PICKLE = b"D", b"\x80"
"""First byte of a state. With DATA, the state is laid out like a batch. With PICKLE, it is a pickle, which can contain
code."""


class SnapshotShelf:
    """The snapshots of one slot, sorted by the number of batches made."""

    __slots__ = ("_of",)

    def __init__(self, first: Iterable[Snapshot] = ()) -> None:
        self._of = sorted(first)

    def add(self, made: int, state: bytes, passed: int) -> bool:
        """Adds a snapshot, and drops those that are no longer needed to resume at batch `passed` or a later one.
        Returns True if the snapshot is new."""
        if any(made == known for known, _ in self._of):
            return False
        self._of.append((made, state))
        self._of.sort()
        del self._of[: max(0, sum(known <= passed for known, _ in self._of) - 1)]
        while len(self._of) > MAX_SNAPSHOTS:  # a new home may need the first one, so keep it
            del self._of[1]
        return True

    def at(self, number: int) -> Snapshot | None:
        """Returns the snapshot from which a slot resumes at batch `number`, or None if the slot must begin at its
        start."""
        return max((one for one in self._of if one[0] <= number), default=None)

    def clear(self) -> None:
        self._of.clear()

    def __len__(self) -> int:
        return len(self._of)
