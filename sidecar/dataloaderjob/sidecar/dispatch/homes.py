"""Slots: the sequences of an IterableDataset. One feeder, the slot's *home*, makes its batches in order. Pure.

Any feeder can make any batch of a map-style stream. In contrast, a slot's batch depends on the batches before it. When
a slot moves, its new home has to rebuild earlier batches without sending them. Therefore, a slot normally stays while
its home serves, and a late batch is not requested elsewhere. There is one exception: a slot moves to a feeder that
makes at least two fewer slots than its home, if few batches have to be rebuilt. Batches from the previous home remain
valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.snapshots import STEPS_APART, SnapshotShelf

MAX_SLOTS = 1024
"""Maximum number of slots of one stream, because a slot's number is untrusted input."""
RETURN_S = 2.0
"""Time for which a slot waits for its home to reconnect, because rebuilding the slot elsewhere may take longer."""
BALANCE_EVERY_S = 1.0
MOST_AGAIN = 64
"""Maximum number of batches to rebuild when a slot moves to a feeder that makes fewer slots."""
GATHER_S = 3.0
"""Maximum wait before the first homes are chosen. They are chosen earlier if each slot can have its own feeder, or if
all listed feeders are connected."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of one stream."""

    number: int
    bundle: bytes
    """The id of the slot's session at a feeder."""
    manifest: bytes
    home: str | None = None
    """The instance of the feeder that makes the slot."""
    next_home: str | None = None
    """The instance of the feeder to which the slot moves once its home has answered all of the slot's tickets."""
    queue: list[int] = field(default_factory=list)
    """A heap of the numbers of the slot's queued tickets."""
    needed: int = 0
    """Batches before this number are not requested again."""
    begun: bool = False
    """True once the home has sent part of the slot, and therefore needs no snapshot to resume from."""
    ranks: int = 0
    """Number of ranks to which the slot's batches are dealt; 0 if the slot belongs to one rank."""
    floor: int = 0
    """No rank requests batches before this number, according to the trainer."""
    snapshots: SnapshotShelf = field(default_factory=SnapshotShelf)
    digests: dict[int, int] = field(default_factory=dict)
    """Digests of the last batches that arrived, by number."""

    @property
    def passed(self) -> int:
        """No rank requests batches before this number."""
        return max(self.floor, self.needed - STEPS_APART * self.ranks)

    def remember(self, made: int, state: bytes) -> bool:
        """Keeps a snapshot. Returns True if it is new."""
        return self.snapshots.add(made, state, self.passed)

    def received(self, number: int, digest: int) -> None:
        """Records the digest of a batch that arrived."""
        self.digests[number] = digest
        for old in [old for old in self.digests if old < self.needed - 1]:
            del self.digests[old]

    def snapshot(self, number: int) -> tuple[int, bytes] | None:
        """Returns the snapshot from which a new home resumes to make batch `number`; None if it must begin at the
        start."""
        return self.snapshots.at(self.passed if self.ranks else number)

    def known(self, number: int) -> tuple[int, int] | None:
        """Returns (number, digest) of the last batch before `number` that arrived."""
        return max((one for one in self.digests.items() if one[0] < number), default=None)


@dataclass(slots=True)
class Slots:
    """The slots of one stream, created as its tickets name them."""

    opened_at: float | None = None
    """The time at which the first slot was named."""
    ranks: int = 0
    """Number of ranks to which the slots' batches are dealt; 0 if the slots belong to one rank."""
    balanced_at: float = 0.0
    """The time of the last check for a slot that another feeder should make."""
    of: dict[int, Slot] = field(default_factory=dict)

    def get(self, now: float, number: int, manifest: bytes) -> Slot:
        """Returns a slot, created if needed. Raises RemoteProtocolError if the stream's bundle has no such slot."""
        found = self.of.get(number)
        if found is not None:
            return found
        bundle = Bundle.parse(manifest)
        if number >= min(bundle.workers, MAX_SLOTS):
            raise RemoteProtocolError(
                f"slot {number} was requested, but the bundle has {bundle.workers} slots, and {MAX_SLOTS} "
                "are allowed"
            )
        if self.opened_at is None:
            self.opened_at, self.ranks = now, bundle.ranks
        own = replace(bundle, slot=number)
        made = self.of[number] = Slot(number, own.id, own.manifest(), ranks=bundle.ranks)
        return made


class Feeder(Protocol):
    """The attributes of a feeder that this module uses."""

    up: bool
    down_since: float
    draining: bool
    is_silent: bool
    load: int


def stays(home: Feeder | None, now: float, *, fits: bool) -> bool:
    """Returns True if a slot keeps its home, or waits for it. A home that is only late with other work keeps its
    slots."""
    if home is None or home.draining or home.is_silent or not fits:
        return False
    return home.up or now - home.down_since <= RETURN_S


def choose_home(
    slots: Slots, able: Mapping[str, Feeder], listed: int, homes: Callable[[], Iterable[str]], now: float
) -> str | None:
    """Returns the instance of the feeder that makes a slot from now on; None while it is better to wait.

    `able`: the feeders that can take the slot, by instance. `homes`: returns the homes of all slots of the pool.

    The feeder with the fewest slots takes the slot. Slots rarely move later, so the first slots wait until feeders have
    had time to connect. If batches are dealt to ranks, the receivers of all ranks must choose the same feeder.
    Therefore, they use only facts that all of them know.
    """
    if not able:
        return None
    wanted = listed if slots.ranks else min(len(slots.of), listed)
    since = now if slots.opened_at is None else slots.opened_at
    if len(able) < wanted and now - since < GATHER_S:
        return None
    if slots.ranks:
        own = Counter(slot.home for slot in slots.of.values())
        return min(able, key=lambda instance: (own[instance], instance))
    count = Counter(homes())
    return min(able, key=lambda instance: (count[instance], able[instance].load))


def better_home(
    slot: Slot, number: int, able: Mapping[str, Feeder], homes: Callable[[], Iterable[str]]
) -> str | None:
    """Returns the instance of a feeder that makes at least two fewer slots than this slot's home and could soon reach
    batch `number`, or None.

    A slot whose batches are dealt to ranks stays, because the receivers of all ranks would have to move it together.
    """
    if slot.home is None or slot.ranks or not able:
        return None
    snapshot = slot.snapshot(number)
    if number - (snapshot[0] if snapshot else 0) > MOST_AGAIN:
        return None
    count = Counter(homes())
    best = min(able, key=lambda instance: (count[instance], able[instance].load))
    return best if count[best] + 2 <= count[slot.home] else None
