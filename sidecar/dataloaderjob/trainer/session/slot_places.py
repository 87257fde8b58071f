"""Decides which batch comes next, and from which slot, in an epoch of an IterableDataset. Pure except for the
environment.

A slot is what torch's worker of that number would make. The order is torch's: one batch of each slot in turn, without
slots that have ended. It depends on the lengths of the slots alone, whenever their ends become known.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dataloaderjob.core import frames
from dataloaderjob.core.blobs import SLOTS
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.core.places import DISTRIBUTED_VARIABLE, SHARES
from dataloaderjob.core.snapshots import PICKLE, SnapshotShelf

DIFFERS = (
    "batch {number} of slot {slot} differed when it was rebuilt, so the batches that follow do not "
    "continue the same sequence: the dataset is not deterministic given its seeds (does it use a clock, "
    "os.urandom, or the order in which processes run?)"
)
_SHORTER = (
    "slot {slot} ended after {batches} batches when it was rebuilt, but had more before: the dataset is "
    "not deterministic given its seeds, or its data has changed"
)
DEALT = -1
"""Stands for the rank in a state with the slots of all ranks."""
_OWNER = uuid.uuid4().hex
"""Identifies the process that has the slots. Another process, of the same script and rank or forked from this one, has
its own."""


class SlotPlace(NamedTuple):
    """The batch that a ticket asks for."""

    slot: int
    number: int
    """The batch's place in its slot."""
    is_probe: bool = False
    """True if it was consumed before the epoch was resumed. It is requested to find out if the slot is that long."""


def counts_before(batches: int, slots: int, ends: Mapping[int, int]) -> list[int]:
    """Returns how many of the first `batches` batches of an epoch belong to each slot, as far as the lengths of slots
    (`ends`) are known."""
    counts = [0] * slots
    left = batches
    while left > 0:
        live = [slot for slot in range(slots) if counts[slot] < ends.get(slot, left + counts[slot])]
        if not live:
            break
        rows = min(ends.get(slot, left + counts[slot]) - counts[slot] for slot in live)
        rows = min(rows, left // len(live))
        for place, slot in enumerate(live):
            counts[slot] += rows if rows else place < left
        left -= rows * len(live) if rows else left
    return counts


def shorter(slot: int, batches: int) -> ServiceError:
    """Makes the error of a slot that ended after `batches` batches, and had more before."""
    return ServiceError(_SHORTER.format(slot=slot, batches=batches))


class Beginnings:
    """Points at which slots lost by a feeder may resume: their snapshots, and the last batches taken from them."""

    def __init__(self, slots: int, snapshots: Mapping[int, tuple[int, bytes]] | None = None) -> None:
        self._slots = slots
        self._snapshots = [SnapshotShelf() for _ in range(slots)]
        for slot, snapshot in (snapshots or {}).items():
            if slot < slots:
                self._snapshots[slot] = SnapshotShelf([snapshot])
        self.taken = [0] * slots
        """Batches before these are not asked for again."""

    def with_beginning(self, packed: bytes, place: SlotPlace) -> bytes:
        """Returns a packed ticket with the slot's beginning, for a feeder that does not know the slot."""
        return frames.with_beginning(packed, self.beginning(place.slot, place.number), self.known(place.slot))

    def beginning(self, slot: int, number: int) -> tuple[int, bytes] | None:
        """Returns where a slot may begin that is asked for batch `number`: (batches made, state), or None for its
        start."""
        return self._snapshots[slot].at(number)

    def known(self, slot: int) -> tuple[int, int] | None:
        """Returns (number, digest) of the last batch taken from a slot."""
        raise NotImplementedError

    def is_asked(self, slot: int, made: int) -> bool:
        """Returns True if `made` batches of a slot may have been made."""
        raise NotImplementedError

    def keep(self, slot: int, made: int, state: bytes) -> None:
        """Keeps a snapshot from a feeder, unless its claim of `made` batches is impossible."""
        if slot < self._slots and self.is_asked(slot, made):
            self._snapshots[slot].add(made, state, self.passed(slot))

    def passed(self, slot: int) -> int:
        """Returns the batch before which a slot that begins again need not begin."""
        return self.taken[slot] - 1


class Places(Beginnings):
    """The batches of one epoch, in order, after those that were consumed before."""

    def __init__(
        self,
        slots: int,
        first: int = 0,
        snapshots: Mapping[int, tuple[int, bytes]] | None = None,
        ends: Mapping[int, int] | None = None,
        expected: Mapping[SlotPlace, int] | None = None,
    ) -> None:
        """`first` is the number of batches consumed before. Each slot is asked for the last of its own among them, and
        yields it only if it is that long; otherwise other slots have more of them. `snapshots` has points at which
        slots may begin, `ends` the known lengths of slots, `expected` the digests of batches consumed before."""
        super().__init__(slots, snapshots)
        self._first = first
        self.expected = expected or {}
        self.ends: dict[int, int] = {slot: n for slot, n in (ends or {}).items() if slot < slots}
        self._proved = [0] * slots
        """Least number of batches that each slot is known to have."""
        self._probes: deque[SlotPlace] = deque()
        self._unanswered = 0
        self._next: list[int] = []
        """The next batch to ask of each slot; empty until it is known where the epoch resumes."""
        self.digests: list[int | None] = [None] * slots
        """The digest of the last batch that was taken from each slot."""
        self.needed = self.taken
        """The same as `taken`. If batches are handed on before they are given, those received count, too."""
        self._settle()

    def next(self) -> SlotPlace | None:
        """Returns the place to ask for now; None at the end, and while answers must come first."""
        if self._probes:
            self._unanswered += 1
            return self._probes.popleft()
        live = [slot for slot in range(len(self._next)) if slot not in self.ends]
        if not live:
            return None
        slot = min(live, key=self._next.__getitem__)
        self._next[slot] += 1
        return SlotPlace(slot, self._next[slot] - 1)

    def known(self, slot: int) -> tuple[int, int] | None:
        digest = self.digests[slot]
        return None if digest is None else (self.taken[slot] - 1, digest)

    def is_asked(self, slot: int, made: int) -> bool:
        return bool(self._next) and made <= self._next[slot]

    def snapshots(self) -> list[tuple[int, bytes] | None]:
        """Returns where each slot may begin when the epoch is resumed."""
        return [self.beginning(slot, given - 1) for slot, given in enumerate(self._given())]

    def ends_given(self) -> dict[int, int]:
        """Returns the lengths of slots whose batches were all given. Other slots have batches that were read and will
        be asked for again."""
        given = self._given()
        return {slot: batches for slot, batches in self.ends.items() if batches <= given[slot]}

    def _given(self) -> list[int]:
        before = counts_before(self._first, self._slots, self.ends)
        return [max(taken, count) for taken, count in zip(self.taken, before, strict=True)]

    def hands_on(self) -> None:
        """Notes that batches are received (`had`) before they are taken."""
        self.needed = list(self.taken)

    def had(self, place: SlotPlace) -> None:
        """Notes that no batch up to this one is asked for again."""
        self.needed[place.slot] = place.number + 1

    def took(self, place: SlotPlace, digest: int | None) -> None:
        """Notes that the batch was taken or, without a digest, the error in its place."""
        self.digests[place.slot] = digest
        self.taken[place.slot] = self._proved[place.slot] = place.number + 1
        self._answered(place)

    def ended(self, place: SlotPlace, batches: int) -> None:
        """Notes that this batch does not exist: its slot has `batches` batches. Raises ServiceError if it had more."""
        if batches < self.needed[place.slot] or place in self.expected:
            raise shorter(place.slot, batches) from None
        self.ends[place.slot] = batches
        self._answered(place)

    def _answered(self, place: SlotPlace) -> None:
        if place.is_probe:
            self._unanswered -= 1
            if not self._unanswered and not self._probes:
                self._settle()

    def _settle(self) -> None:
        counts = counts_before(self._first, self._slots, self.ends)
        self._probes += (
            SlotPlace(slot, count - 1, is_probe=True)
            for slot, count in enumerate(counts)
            if count > self._proved[slot] and slot not in self.ends
        )
        if not self._probes:
            self._next = counts


def pack(places: Places, rank: int) -> dict[str, Any]:
    """Returns a state's entry for the slots, which are this rank's own."""
    digests = [places.known(slot) for slot in range(len(places.taken))]
    return {"rank": rank, **packed(places.snapshots(), digests, places.ends_given())}


def packed(
    snapshots: Sequence[tuple[int, bytes] | None],
    digests: Sequence[tuple[int, int] | None],
    ends: Mapping[int, int],
) -> dict[str, Any]:
    """Returns a state's entry for slots."""
    return {
        "slots": [None if s is None else [s[0], base64.b64encode(s[1]).decode()] for s in snapshots],
        "digests": [None if one is None else [one[0], f"{one[1]:016x}"] for one in digests],
        "ends": sorted(map(list, ends.items())),
    }


@dataclass(frozen=True, slots=True)
class Saved:
    """A state's entry for this rank's slots. It is empty if the state is another rank's: the slots then begin at their
    start."""

    snapshots: Mapping[int, tuple[int, bytes]] = field(default_factory=dict)
    """(batches made, state), by slot."""
    digests: Mapping[SlotPlace, int] = field(default_factory=dict)
    """Digests of the last batches that were given, by the probe that asks for each again."""
    ends: Mapping[int, int] = field(default_factory=dict)
    """Number of batches in each slot that has ended."""
    taken: Sequence[int] = ()
    """Number of batches dealt from each slot, if batches are dealt to ranks."""

    @staticmethod
    def of(state: Any, rank: int, *, slots: int | None = None, allow_pickle: bool = False) -> Saved:
        """Reads a state's entry for a loader of `slots` slots. Raises InputError if `pack` did not make it, or if it
        has pickles that are not allowed."""
        if not isinstance(state, Mapping) or state.get("rank") not in (rank, DEALT):
            return Saved()
        try:
            snapshots = {
                slot: (int(one[0]), base64.b64decode(one[1], validate=True))
                for slot, one in enumerate(state["slots"])
                if one is not None
            }
            _refuse_pickles(snapshots, allow_pickle)
            if slots is not None and not _is_of(state, slots):
                raise ValueError(f"it needs {slots} slots")
            digests = {slot: one for slot, one in enumerate(state["digests"]) if one is not None}
            return Saved(
                snapshots,
                {
                    SlotPlace(slot, int(n), is_probe=True): int(text, 16)
                    for slot, (n, text) in digests.items()
                },
                {int(slot): int(batches) for slot, batches in state["ends"]},
                [int(n) for n in state.get("taken", ())],
            )
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise InputError(
                f"the state's entry for slots cannot be read ({exc}): load the result of state_dict()"
            ) from exc


def _is_of(state: Mapping[str, Any], slots: int) -> bool:
    """True if a loader with `slots` slots may have made an entry."""
    taken = state.get("taken")
    counts = {len(state["slots"]), len(state["digests"]), len(taken) if taken else slots}
    return counts == {slots} and all(0 <= slot < slots for slot, _ in state["ends"])


def _refuse_pickles(snapshots: Mapping[int, tuple[int, bytes]], allow_pickle: bool) -> None:
    pickled = [slot for slot, (_, snapshot) in snapshots.items() if snapshot[:1] == PICKLE]
    if pickled and not allow_pickle:
        raise InputError(
            f"the state has a pickle of slot {pickled[0]}, which runs code when it is loaded: pass "
            "allow_pickle=True to the DataLoader if you trust whoever wrote it"
        )


def world() -> int:
    """Returns the number of ranks. Each has its share of the data."""
    found = shares().get("WORLD_SIZE", "1")
    return int(found) if found.isdecimal() else 1


def shares() -> dict[str, str]:
    """Returns the variables in which a dataset finds its rank, as in a worker forked by torch."""
    found = {name: os.environ[name] for name in SHARES if os.environ.get(name)}
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        found |= {
            "RANK": str(distributed.get_rank()), "WORLD_SIZE": str(distributed.get_world_size()),
            DISTRIBUTED_VARIABLE: "1",
        }  # fmt: skip
    return found


def facts(own: Mapping[str, Any], *, are_dealt: bool = False) -> dict[str, Any]:
    """Returns a bundle's facts for slots. With `are_dealt` the slots are those of all ranks."""
    return {**own, SLOTS: True, **({} if are_dealt else {"owner": f"{_OWNER}-{os.getpid()}"})}


def rank() -> int:
    """Returns this process's rank among `world()`. Raises InputError if it is unknown."""
    found = shares().get("RANK", "0" if world() == 1 else "")
    if not found.isdecimal() or int(found) >= world():
        raise InputError(
            f"tail= distributes batches among {world()} ranks (WORLD_SIZE) and requires RANK, from 0 to "
            f"{world() - 1}, but it is {found!r}; calling init_process_group() before iter(loader) also "
            "sets it"
        )
    return int(found)
