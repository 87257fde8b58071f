"""Slots: the sequences of an IterableDataset, each made in order by one feeder, its *home*. Pure.

Any feeder can make any batch of a map-style stream; a batch of a slot follows from those before it, which a new home
makes again, unsent, when the slot moves. So a slot stays where it is for as long as its home serves, and a batch that
comes late is not asked for elsewhere. What an earlier home still sends is as good as what the next one makes. A slot
moves to a feeder that has come and makes two slots fewer, where few batches are to be made again for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.snapshots import STEPS_APART, Snapshots

MAX_SLOTS = 1024
"""Most slots of one stream: a slot's number is a stranger's word."""
RETURN_S = 2.0
"""A home whose connection broke has so long to come back: making a slot again may take longer than that."""
BALANCE_EVERY_S = 1.0
MOST_AGAIN = 64
"""A slot moves to a feeder that makes fewer only where so many batches are made again at most."""
GATHER_S = 3.0
"""First homes are chosen once as many feeders serve as there are slots, or are listed, or after this."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of one stream."""

    number: int
    bundle: bytes
    """Names its session at a feeder."""
    manifest: bytes
    home: str | None = None
    """The instance of the feeder that makes it."""
    next_home: str | None = None
    """The instance of the feeder to which it moves once its home owes nothing of it."""
    queue: list[int] = field(default_factory=list)
    """A heap of its tickets that are to be asked for."""
    needed: int = 0
    """Batches before it are not asked for again."""
    begun: bool = False
    """Its home has sent something of it: it needs no snapshot to begin at."""
    ranks: int = 0
    """Those that its batches are dealt to; 0: it is one rank's."""
    floor: int = 0
    """No rank asks for batches before it, by the trainer's word."""
    snapshots: Snapshots = field(default_factory=Snapshots)
    digests: dict[int, int] = field(default_factory=dict)
    """Those of the last batches that came, by number."""

    @property
    def passed(self) -> int:
        """No rank asks for batches before it."""
        return max(self.floor, self.needed - STEPS_APART * self.ranks)

    def remember(self, made: int, state: bytes) -> bool:
        """Keeps a snapshot. Says whether it is a new one."""
        return self.snapshots.add(made, state, self.passed)

    def received(self, number: int, digest: int) -> None:
        """A batch came."""
        self.digests[number] = digest
        for old in [old for old in self.digests if old < self.needed - 1]:
            del self.digests[old]

    def snapshot(self, number: int) -> tuple[int, bytes] | None:
        """The snapshot at which a new home begins whose first batch is `number`; None where it begins at the start."""
        return self.snapshots.at(self.passed if self.ranks else number)

    def known(self, number: int) -> tuple[int, int] | None:
        """(number, digest) of the last batch before `number` that came."""
        return max((one for one in self.digests.items() if one[0] < number), default=None)


@dataclass(slots=True)
class Slots:
    """Those of one stream, made as its tickets name them."""

    opened_at: float | None = None
    """When the first was named."""
    ranks: int = 0
    """Those that their batches are dealt to; 0: they are one rank's."""
    balanced_at: float = 0.0
    """When it was looked last whether one is better made elsewhere."""
    of: dict[int, Slot] = field(default_factory=dict)

    def get(self, now: float, number: int, manifest: bytes) -> Slot:
        """Raises RemoteProtocolError where the stream's bundle has no such slot."""
        found = self.of.get(number)
        if found is not None:
            return found
        bundle = Bundle.parse(manifest)
        if number >= min(bundle.workers, MAX_SLOTS):
            raise RemoteProtocolError(
                f"slot {number} was asked for; the bundle has {bundle.workers}, and {MAX_SLOTS} are allowed"
            )
        if self.opened_at is None:
            self.opened_at, self.ranks = now, bundle.ranks
        own = replace(bundle, slot=number)
        made = self.of[number] = Slot(number, own.id, own.manifest(), ranks=bundle.ranks)
        return made


class Feeder(Protocol):
    """What is asked of a feeder."""

    up: bool
    down_since: float
    draining: bool
    is_silent: bool
    load: int


def stays(home: Feeder | None, now: float, *, fits: bool) -> bool:
    """Whether a slot waits for its home, or is asked for there. One that is only late with other work keeps it."""
    if home is None or home.draining or home.is_silent or not fits:
        return False
    return home.up or now - home.down_since <= RETURN_S


def choose_home(
    slots: Slots, able: Mapping[str, Feeder], listed: int, homes: Iterable[str], now: float
) -> str | None:
    """The instance of the feeder that makes a slot from now on; None while it is better to wait.

    `able`: feeders that can take it. `homes`: those of all slots of the pool; who has the fewest takes one more.
    Slots stay where they are, so the first ones wait until the feeders that they can use have had time to connect.
    Where batches are dealt to ranks, the receivers of all of them shall choose the same: by what they all know.
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
    count = Counter(homes)
    return min(able, key=lambda instance: (count[instance], able[instance].load))


def better_home(slot: Slot, number: int, able: Mapping[str, Feeder], homes: Iterable[str]) -> str | None:
    """The instance of a feeder that makes two slots fewer than this one's home, and would soon go on with `number`.

    Slots that are dealt to ranks stay: their receivers would have to move them together.
    """
    if slot.home is None or slot.ranks or not able:
        return None
    snapshot = slot.snapshot(number)
    if number - (snapshot[0] if snapshot else 0) > MOST_AGAIN:
        return None
    count = Counter(homes)
    best = min(able, key=lambda instance: (count[instance], able[instance].load))
    return best if count[best] + 2 <= count[slot.home] else None
