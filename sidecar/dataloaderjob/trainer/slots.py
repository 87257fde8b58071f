"""Which batch of which slot comes next in an epoch of an IterableDataset. Pure but for the environment.

A slot is what torch's worker of that number would make. The order is torch's: one batch of each slot in turn, slots
that have ended left out. It follows from the lengths of the slots alone, whenever their ends become known.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dataloaderjob.core.blobs import SLOTS
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.places import DISTRIBUTED_VARIABLE, RANK_VARIABLES

SHARES = (
    *RANK_VARIABLES, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "GLOBAL_RANK",
    "NODE_RANK", "NNODES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
)  # fmt: skip
"""Variables by which datasets find their share of the data."""
_OWNER = uuid.uuid4().hex
"""A slot is this process's: another one, of the same script and rank, has its own."""


class Place(NamedTuple):
    """What a ticket asks for."""

    slot: int
    number: int
    """The batch's place in its slot."""
    is_probe: bool = False
    """It was consumed before the epoch was resumed: asked for to know whether the slot is that long."""


def counts_before(batches: int, slots: int, ends: Mapping[int, int]) -> list[int]:
    """How many of the first `batches` of an epoch are of each slot, as far as their lengths (`ends`) are known."""
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


class Places:
    """The batches of one epoch, in order, after those that were consumed before."""

    def __init__(
        self, slots: int, first: int = 0, snapshots: Mapping[int, tuple[int, bytes]] | None = None
    ) -> None:
        """first: batches consumed before. Each slot is asked for the last of its own among them, and gives it only if
        it is that long: others have more of them otherwise. snapshots: where slots may begin."""
        self._snapshots = {slot: [snapshot] for slot, snapshot in (snapshots or {}).items() if slot < slots}
        self._slots, self._first = slots, first
        self._ends: dict[int, int] = {}
        self._proved = [0] * slots
        """Each slot has so many batches at least."""
        self._probes: deque[Place] = deque()
        self._unanswered = 0
        self._next: list[int] = []
        """The next batch to ask of each slot; empty until it is known where the epoch goes on."""
        self.taken = [0] * slots
        """Batches before these are not asked for again."""
        self._settle()

    def next(self) -> Place | None:
        """What to ask for now; None at the end, and while answers are to come first."""
        if self._probes:
            self._unanswered += 1
            return self._probes.popleft()
        live = [slot for slot in range(len(self._next)) if slot not in self._ends]
        if not live:
            return None
        slot = min(live, key=self._next.__getitem__)
        self._next[slot] += 1
        return Place(slot, self._next[slot] - 1)

    def beginning(self, place: Place) -> tuple[int, bytes] | None:
        """Where a slot may begin of which nothing was taken yet: (batches made, state)."""
        if self.taken[place.slot]:
            return None
        return self._usable(place.slot, place.number)

    def keep(self, slot: int, made: int, state: bytes) -> None:
        """A snapshot came."""
        if slot < self._slots:
            own = self._snapshots.setdefault(slot, [])
            own.append((made, state))
            own.sort()
            while len(own) > 1 and own[1][0] < self.taken[slot]:
                del own[0]

    def snapshots(self) -> list[tuple[int, bytes] | None]:
        """Where each slot may begin when the epoch is gone on with."""
        return [self._usable(slot, self.taken[slot] - 1) for slot in range(self._slots)]

    def _usable(self, slot: int, number: int) -> tuple[int, bytes] | None:
        """The last one before batch `number`, which is asked for first."""
        return max((one for one in self._snapshots.get(slot, ()) if one[0] <= number), default=None)

    def took(self, place: Place) -> None:
        """Its batch was taken, or the error that stands for it."""
        self.taken[place.slot] = self._proved[place.slot] = place.number + 1
        self._answered(place)

    def ended(self, place: Place, batches: int) -> None:
        """There is no such batch: its slot has so many."""
        self._ends[place.slot] = batches
        self._answered(place)

    def _answered(self, place: Place) -> None:
        if place.is_probe:
            self._unanswered -= 1
            if not self._unanswered and not self._probes:
                self._settle()

    def _settle(self) -> None:
        counts = counts_before(self._first, self._slots, self._ends)
        self._probes += (
            Place(slot, count - 1, is_probe=True)
            for slot, count in enumerate(counts)
            if count > self._proved[slot] and slot not in self._ends
        )
        if not self._probes:
            self._next = counts


def pack(snapshots: Sequence[tuple[int, bytes] | None], rank: int) -> dict[str, Any]:
    """What a state has of them, which are this rank's own."""
    texts = [None if one is None else [one[0], base64.b64encode(one[1]).decode()] for one in snapshots]
    return {"rank": rank, "slots": texts}


def unpack(state: Any, rank: int) -> dict[int, tuple[int, bytes]]:
    """What `pack` made, by slot. None of another rank's: its slots begin at their start.

    Raises InputError for what `pack` did not make.
    """
    if not isinstance(state, Mapping) or state.get("rank") != rank:
        return {}
    try:
        return {
            slot: (int(one[0]), base64.b64decode(one[1], validate=True))
            for slot, one in enumerate(state["slots"])
            if one is not None
        }
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise InputError(
            f"the state's snapshots of slots cannot be read ({exc}): load what state_dict() returned"
        ) from exc


def shares() -> dict[str, str]:
    """What tells a dataset which rank it is, as a worker that torch forks would find it."""
    found = {name: os.environ[name] for name in SHARES if os.environ.get(name)}
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        found |= {
            "RANK": str(distributed.get_rank()), "WORLD_SIZE": str(distributed.get_world_size()),
            DISTRIBUTED_VARIABLE: "1",
        }  # fmt: skip
    return found


def facts(own: Mapping[str, Any]) -> dict[str, Any]:
    """A bundle's facts, for slots."""
    return {**own, SLOTS: True, "owner": _OWNER}
