"""Snapshots of one slot of an IterableDataset: points from which it may begin again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

MAX_SNAPSHOTS = 16
"""Maximum number of snapshots kept of one slot: a feeder may send any number."""
STEPS_APART = 2
"""Ranks that share slots step together: they are always fewer than STEPS_APART steps apart."""
STEPS_AHEAD, BATCHES_AHEAD = 4, 16
"""Lead of a shared slot over the slowest rank: the batches of STEPS_AHEAD steps, plus BATCHES_AHEAD. A rank requests
one step less, so that no rank waits for a batch that will not be made."""
Snapshot = tuple[int, bytes]
"""(batches made, state)."""
DATA, PICKLE = b"D", b"\x80"
"""First byte of a state: DATA if it is laid out like a batch; PICKLE begins every pickle. A pickle is code."""


class SnapshotShelf:
    """The snapshots of one slot, the oldest first."""

    __slots__ = ("_of",)

    def __init__(self, first: Iterable[Snapshot] = ()) -> None:
        self._of = sorted(first)

    def add(self, made: int, state: bytes, passed: int) -> bool:
        """Keeps a snapshot, and drops those that no batch from `passed` on needs as a beginning. Returns True if it is
        new."""
        if any(made == known for known, _ in self._of):
            return False
        self._of.append((made, state))
        self._of.sort()
        del self._of[: max(0, sum(known <= passed for known, _ in self._of) - 1)]
        while len(self._of) > MAX_SNAPSHOTS:  # a new home may need the first
            del self._of[1]
        return True

    def at(self, number: int) -> Snapshot | None:
        """Returns the snapshot at which a slot begins if its first batch is `number`; None if it begins at its
        start."""
        return max((one for one in self._of if one[0] <= number), default=None)

    def clear(self) -> None:
        self._of.clear()

    def __len__(self) -> int:
        return len(self._of)
