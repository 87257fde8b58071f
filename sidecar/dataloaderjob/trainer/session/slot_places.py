"""The slots of an IterableDataset: where a lost slot may resume, a state's entry for slots, and this process's rank.
Pure except for the environment.

A slot's batches are those that the torch worker of the same number would make.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.blobs import SLOTS
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.core.places import DISTRIBUTED_VARIABLE, SHARES
from dataloaderjob.core.snapshots import PICKLE, SnapshotShelf

_SHORTER = (
    "slot {slot} ended after {batches} batches when it was rebuilt, but had more before: the dataset is "
    "not deterministic given its seeds, or its data has changed"
)
DEALT = -1
"""Placeholder for the rank in a state that contains the slots of all ranks."""
_OWNER = uuid.uuid4().hex
"""Identifies the process that owns the slots. A process with the same script and rank, or a forked child, has its own
slots."""


class SlotPlace(NamedTuple):
    """The batch that a ticket asks for."""

    slot: int
    number: int
    """The batch's place in its slot."""
    is_probe: bool = False
    """True if the batch was consumed before the epoch was resumed. It is requested again to find out whether the slot
    is long enough."""


def shorter(slot: int, batches: int) -> ServiceError:
    """Returns the error for a slot that ended after `batches` batches but had more before."""
    return ServiceError(_SHORTER.format(slot=slot, batches=batches))


class Beginnings:
    """Points at which a slot may resume after a feeder lost it: its snapshots, and the last batch taken from it."""

    def __init__(self, slots: int, snapshots: Mapping[int, tuple[int, bytes]] | None = None) -> None:
        self._slots = slots
        self._snapshots = [SnapshotShelf() for _ in range(slots)]
        for slot, snapshot in (snapshots or {}).items():
            if slot < slots:
                self._snapshots[slot] = SnapshotShelf([snapshot])
        self.taken = [0] * slots
        """Number of batches taken from each slot. Earlier batches are not requested again."""

    def with_beginning(self, packed: bytes, place: SlotPlace) -> bytes:
        """Returns a packed ticket with the slot's beginning, for a feeder that does not know the slot."""
        return ticket_codec.with_beginning(
            packed, self.beginning(place.slot, place.number), self.known(place.slot)
        )

    def beginning(self, slot: int, number: int) -> tuple[int, bytes] | None:
        """Returns the point at which a slot may begin if batch `number` is requested: (batches made, state), or None
        for the slot's start."""
        return self._snapshots[slot].at(number)

    def known(self, slot: int) -> tuple[int, int] | None:
        """Returns (number, digest) of the last batch taken from a slot."""
        raise NotImplementedError

    def is_asked(self, slot: int, made: int) -> bool:
        """Returns True if `made` batches of a slot may have been made."""
        raise NotImplementedError

    def keep(self, slot: int, made: int, state: bytes) -> None:
        """Keeps a snapshot from a feeder, unless the slot cannot have made `made` batches yet."""
        if slot < self._slots and self.is_asked(slot, made):
            self._snapshots[slot].add(made, state, self.passed(slot))

    def passed(self, slot: int) -> int:
        """Returns the earliest batch at which a restarted slot may have to begin."""
        return self.taken[slot] - 1


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
    """A state's entry for this rank's slots. It is empty if the state belongs to another rank. The slots then begin at
    their start."""

    snapshots: Mapping[int, tuple[int, bytes]] = field(default_factory=dict)
    """(batches made, state), by slot."""
    digests: Mapping[SlotPlace, int] = field(default_factory=dict)
    """Digests of the last batches that were returned. Each key is the probe that requests the batch again."""
    ends: Mapping[int, int] = field(default_factory=dict)
    """Number of batches in each slot that has ended."""
    taken: Sequence[int] = ()
    """Number of batches dealt from each slot; empty unless batches are dealt to ranks."""

    @staticmethod
    def of(state: Any, rank: int, *, slots: int | None = None, allow_pickle: bool = False) -> Saved:
        """Reads a state's entry for a loader with `slots` slots. Raises InputError if the entry is invalid, or if it
        contains pickles that are not allowed."""
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
                raise ValueError(f"the loader has {slots} slots, but the entry has a different number")
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
    """Returns True if a loader with `slots` slots may have made this entry."""
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
    """Returns the number of ranks across which the data is sharded."""
    found = shares().get("WORLD_SIZE", "1")
    return int(found) if found.isdecimal() else 1


def shares() -> dict[str, str]:
    """Returns the environment variables in which a dataset finds its rank, as in a worker forked by torch."""
    found = {name: os.environ[name] for name in SHARES if os.environ.get(name)}
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        found |= {
            "RANK": str(distributed.get_rank()), "WORLD_SIZE": str(distributed.get_world_size()),
            DISTRIBUTED_VARIABLE: "1",
        }  # fmt: skip
    return found


def facts(own: Mapping[str, Any], *, are_dealt: bool = False) -> dict[str, Any]:
    """Returns a bundle's facts for slots. With `are_dealt`, the slots belong to all ranks."""
    return {**own, SLOTS: True, **({} if are_dealt else {"owner": f"{_OWNER}-{os.getpid()}"})}


def rank() -> int:
    """Returns this process's rank among the `world()` ranks. Raises InputError if the rank is unknown."""
    found = shares().get("RANK", "0" if world() == 1 else "")
    if not found.isdecimal() or int(found) >= world():
        raise InputError(
            f"tail= distributes batches among {world()} ranks (WORLD_SIZE), so RANK must be from 0 to {world() - 1}, "
            f"but is {found!r}: set it, or call init_process_group() before iter(loader)"
        )
    return int(found)
