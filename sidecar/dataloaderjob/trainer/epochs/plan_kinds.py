"""The kinds of plans for slots' batches. This rank receives all batches or, with `tail=`, all ranks take turns (see
`dealing`)."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataloaderjob.core.control import MOST_AHEAD
from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.epochs.dealing import Deal
from dataloaderjob.trainer.epochs.plans import Places, Plan
from dataloaderjob.trainer.epochs.source import EpochSource
from dataloaderjob.trainer.session import slot_places
from dataloaderjob.trainer.session.slot_places import Saved
from dataloaderjob.trainer.session.spec import EpochSpec

_numbers = itertools.count(1 << 20)
_of_loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _number_of(loader: EpochSource) -> int:
    """Returns this loader's number among the process's loaders that deal batches. Other loaders do not count, because
    their number may differ from rank to rank."""
    if loader not in _of_loaders:
        _of_loaders[loader] = next(_numbers)
    return _of_loaders[loader]


@dataclass(frozen=True, slots=True)
class PlanKind:
    """The settings of a loader's plans."""

    tail: str | None = None
    """The loader's `tail`; None if this rank receives all batches of the slots."""
    ranks: int = 1
    """Number of ranks that share the batches."""
    rank: int = 0

    @staticmethod
    def of(spec: EpochSpec) -> PlanKind:
        """Returns the settings for a loader. Raises InputError if the number of ranks is too large, or if this
        process's rank is unknown."""
        if spec.tail is None:
            return PlanKind()
        kind = PlanKind(spec.tail, slot_places.world(), slot_places.rank())
        if kind.ranks > MOST_AHEAD:
            raise InputError(f"tail= supports at most {MOST_AHEAD} ranks, but WORLD_SIZE is {kind.ranks}")
        return kind

    def session(self, loader: EpochSource, facts: Mapping[str, Any], batches: list[Any]) -> dict[str, Any]:
        """Returns the bundle's fields that identify the owner of the slots. `batches` holds the settings that determine
        the batches."""
        if self.tail is None:
            return {"env": slot_places.shares(), "facts": slot_places.facts(facts)}
        return {
            "loader": _number_of(loader),
            "env": {"RANK": "0", "WORLD_SIZE": "1"},  # the dataset then yields all of its data
            "ranks": self.ranks,
            "facts": {**slot_places.facts(facts, are_dealt=True), "batches": [*batches, self.tail]},
        }

    def plan(self, slots: int, first: int, saved: Saved) -> Plan[Any]:
        """Returns the plan of an epoch. Its first `first` batches were already returned. Raises InputError if `saved`
        does not show how many of these belong to each slot."""
        if self.tail is None:
            return Places(slots, first, saved.snapshots, saved.ends, saved.digests)
        if first and not saved.taken:
            raise InputError(
                "with tail=, an epoch resumes only from a state that state_dict() returned; a bare number of batches "
                "does not show how many of them belong to each slot"
            )
        given = {place.slot: (place.number, digest) for place, digest in saved.digests.items()}
        return Deal(
            slots, self.ranks, self.rank, tail=self.tail, first=saved.taken, given=given,
            snapshots=saved.snapshots, ends=saved.ends,
        )  # fmt: skip

    def stage_rank(self) -> int:
        """Returns the rank from which a stage's random numbers derive. If batches are dealt, all ranks use 0, so each
        batch is the same as in a single process."""
        rank = slot_places.shares().get("RANK", "0") if self.tail is None else "0"
        return int(rank) if rank.isdecimal() else 0
