"""Which batch of which slot comes next in an epoch of an IterableDataset. Pure but for the environment.

A slot is what torch's worker of that number would make. The order is torch's: one batch of each slot in turn, slots
that have ended left out. It follows from the lengths of the slots alone, whenever their ends become known.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dataloaderjob.core.blobs import SLOTS
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
    """Of the batch in its slot."""
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

    def __init__(self, slots: int, first: int = 0) -> None:
        """first: batches consumed before. Each slot is asked for the last of its own among them, and gives it only if
        it is that long: others have more of them otherwise."""
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
