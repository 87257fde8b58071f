"""Snapshots of one slot of an IterableDataset: where it may begin again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

MAX_SNAPSHOTS = 16
"""Most that are kept of one slot: they are a feeder's word."""
STEPS_APART = 2
"""Ranks to which the batches of slots are dealt step together: they are never so many steps apart."""
STEPS_AHEAD, BATCHES_AHEAD = 4, 16
"""How far a slot that ranks share is made ahead of the slowest rank: the batches of so many steps, and so many more. A
rank asks for one step less, so that none waits for what nobody is going to make."""
Snapshot = tuple[int, bytes]
"""(batches made, state)."""
DATA, PICKLE = b"D", b"\x80"
"""How a state begins: it is laid out as a batch is, or pickled, which `pickle` begins so. A pickle is code."""


class Snapshots:
    """Those of one slot, the oldest first."""

    __slots__ = ("_of",)

    def __init__(self, first: Iterable[Snapshot] = ()) -> None:
        self._of = sorted(first)

    def add(self, made: int, state: bytes, passed: int) -> bool:
        """Keeps a snapshot; of those at which no batch from `passed` on needs to begin, the last. Says whether it is a
        new one."""
        if any(made == known for known, _ in self._of):
            return False
        self._of.append((made, state))
        self._of.sort()
        del self._of[: max(0, sum(known <= passed for known, _ in self._of) - 1)]
        while len(self._of) > MAX_SNAPSHOTS:  # the first is that which a new home may need
            del self._of[1]
        return True

    def at(self, number: int) -> Snapshot | None:
        """The one at which a slot begins whose first batch is `number`; None where it begins at its start."""
        return max((one for one in self._of if one[0] <= number), default=None)

    def clear(self) -> None:
        self._of.clear()

    def __len__(self) -> int:
        return len(self._of)
