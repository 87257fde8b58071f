"""Dealing the batches of all slots to ranks in turn, so that all ranks take the same number of steps. This module is
pure.

Batches are numbered q = 0, 1, 2, ... in the order in which a single torch loader, with one worker for each slot, would
return them. Rank r of W gets the batches with q mod W = r. Step t consists of W batches, from batch tW on. Which slot
makes batch q depends on where the slots end. Each rank therefore asks about all batches in order: it requests its own,
and asks whether those of other ranks exist. It returns its batch of a step once it knows that all batches of the step
exist.

A slot is assumed to continue until its end is known. Its end moves later batches to other ranks. Answers to tickets
sent earlier then only show which batches exist. Those batches are requested again in the new order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dataloaderjob.core.errors import DataLoaderJobError, InputError, ServiceError
from dataloaderjob.core.snapshots import BATCHES_AHEAD, STEPS_AHEAD, STEPS_APART
from dataloaderjob.trainer.epochs.arguments import TAILS
from dataloaderjob.trainer.epochs.plans import Plan
from dataloaderjob.trainer.session.slot_places import DEALT, SlotPlace, packed, shorter

DROP, PAD, ERROR = TAILS
"""The values of `tail`, for an end with fewer batches than ranks: drop them, pad them, or raise InputError."""


class Turn(NamedTuple):
    """One batch in the order."""

    place: SlotPlace
    is_own: bool
    is_asked: bool
    """True if a ticket asks about this batch. False for another rank's batch that is already known to exist."""


class Mark(NamedTuple):
    """A position between two steps."""

    taken: list[int]
    given: list[tuple[int, int] | None]


class Deal(Plan[Mark]):
    """The plan that deals one rank its share of an epoch's batches."""

    keeps_pace = True

    def __init__(
        self,
        slots: int,
        ranks: int,
        rank: int,
        *,
        tail: str = DROP,
        first: Sequence[int] = (),
        given: Mapping[int, tuple[int, int]] | None = None,
        snapshots: Mapping[int, tuple[int, bytes]] | None = None,
        ends: Mapping[int, int] | None = None,
    ) -> None:
        """`first` holds, for each slot, the number of its batches in earlier steps. `given` holds the number and digest
        of the last batch returned from each slot. `snapshots` holds points from which slots may start. `ends` holds the
        known lengths of slots, in batches."""
        super().__init__(slots, snapshots)
        self.ranks, self._rank, self._tail = ranks, rank, tail
        self._first = list(first) or [0] * slots
        self.taken = self._first[:]
        """Number of batches in earlier steps, by slot."""
        self.ends = dict(ends or {})
        self._there = self.taken[:]
        """Number of batches that are known to exist, by slot."""
        self._resolved = self.taken[:]
        """Number of batches with a known place in the order, by slot."""
        self.in_step: list[SlotPlace] = []
        """Batches of this step that are known to exist, in order."""
        self.is_padded = False
        """True if the last step is incomplete, and some of its batches are returned twice."""
        self._plan: deque[Turn] = deque()
        self._stale = 0
        """Number of unanswered tickets that were sent before a slot's end was known."""
        self._next = self.taken[:]
        self._ahead = 0
        """Number of batches planned, counted from the first batch of this step."""
        self._extra: SlotPlace | None = None
        """The batch that pads the last step, until it is requested."""
        self._begun: set[int] = set()
        """Slots from which batches were requested."""
        self._given = [(given or {}).get(slot) for slot in range(slots)]
        self._position = Mark(self.taken[:], self._given[:])
        """The position that states contain. It lags behind if a step's batches are passed on before they are
        returned."""

    # Asking

    def next(self, most: int) -> tuple[SlotPlace, bool] | None:
        if self._extra is not None:
            place, self._extra = self._extra, None
            return place, True
        while not self._stale and self._ahead < most:
            live = [
                slot
                for slot in range(self._slots)
                if self._next[slot] < self.ends.get(slot, self._next[slot] + 1)
            ]
            if not live:
                return None
            slot = min(live, key=self._next.__getitem__)
            if self._next[slot] >= self.needed(slot) + (STEPS_AHEAD - 1) * self.ranks + BATCHES_AHEAD:
                return None
            place, is_own = SlotPlace(slot, self._next[slot]), self._ahead % self.ranks == self._rank
            is_asked = is_own or place.number >= self._there[slot]
            self._next[slot] += 1
            self._ahead += 1
            self._plan.append(Turn(place, is_own, is_asked))
            if is_asked:
                return place, is_own
            self._pass_known()
        return None

    def needed(self, slot: int) -> int:
        return self._position.taken[slot]

    def begins(self, slot: int) -> bool:
        is_first = slot not in self._begun
        self._begun.add(slot)
        return is_first

    # Answers

    def there(self, place: SlotPlace, digest: int | None = None) -> bool:  # noqa: ARG002  none is compared
        if self.is_padded:
            return True
        self._there[place.slot] = max(self._there[place.slot], place.number + 1)
        if self._stale:
            self._drop_stale()
            return False
        turn = self._plan.popleft()
        assert turn.place == place  # noqa: S101  answers come in the order of the tickets
        self._resolve(turn)
        self._pass_known()
        return turn.is_own

    def ended(self, place: SlotPlace, batches: int) -> None:
        if batches < self._there[place.slot] or self.is_padded:
            raise shorter(place.slot, batches) from None
        is_new = place.slot not in self.ends
        self.ends[place.slot] = batches
        if self._stale:
            self._drop_stale()
            return
        self._plan.popleft()
        if is_new:
            self._stale = sum(turn.is_asked for turn in self._plan)
            self._plan.clear()
            if not self._stale:
                self._begin_anew()
        else:
            self._pass_known()

    def is_lost(self, place: SlotPlace, error: Exception) -> bool:  # noqa: ARG002  the same for all places
        return isinstance(error, DataLoaderJobError)  # it is then unknown which batches of the slot exist

    def _drop_stale(self) -> None:
        self._stale -= 1
        if not self._stale:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._next, self._ahead = self._resolved[:], len(self.in_step)

    def _pass_known(self) -> None:
        while self._plan and not self._plan[0].is_asked:
            self._resolve(self._plan.popleft())

    def _resolve(self, turn: Turn) -> None:
        self._resolved[turn.place.slot] += 1
        self.in_step.append(turn.place)

    # Steps

    @property
    def is_whole(self) -> bool:
        """True if all batches of this step are known to exist."""
        return len(self.in_step) >= self.ranks

    @property
    def is_due(self) -> bool:
        return self.is_padded or self.is_whole

    @property
    def is_over(self) -> bool:
        """True if nothing is left to request, no answer is outstanding, and this step is incomplete."""
        return (
            not self._stale
            and not self._plan
            and not self.is_whole
            and all(
                self._next[slot] >= self.ends.get(slot, self._next[slot] + 1) for slot in range(self._slots)
            )
        )

    def pads(self) -> bool:
        """Pads the incomplete last step, if `tail` requires it. Returns False if no step is left. Raises InputError if
        batches are left and `tail` is "error"."""
        if self.is_padded or not self.is_over:
            raise ServiceError("no batch of the step is left to request: please report this")
        here = len(self.in_step)
        if here and self._tail == ERROR:
            raise InputError(
                f"{here} batches are left for {self.ranks} ranks at the end of the epoch: tail='drop' leaves them "
                "out, tail='pad' returns some of them twice"
            )
        self.is_padded = bool(here) and self._tail != DROP
        if self.is_padded and self._rank >= here:
            self._extra = self.in_step[self._rank % here]
        return self.is_padded

    def took(self, place: SlotPlace, digest: int | None) -> Mark:
        """Begins the next step. Returns the position after the current one."""
        self._given[place.slot] = None if digest is None else (place.number, digest)
        self.is_padded = False
        done, self.in_step = self.in_step[: self.ranks], self.in_step[self.ranks :]
        for known in done:
            self.taken[known.slot] = max(self.taken[known.slot], known.number + 1)
        self._ahead -= len(done)
        return Mark(self.taken[:], self._given[:])

    def stands(self, mark: Mark) -> None:
        self._position = mark

    def passed(self, slot: int) -> int:
        return max(self._first[slot], self.needed(slot) - STEPS_APART * self.ranks)

    # State

    def known(self, slot: int) -> tuple[int, int] | None:
        return self._given[slot]

    def is_asked(self, slot: int, made: int) -> bool:
        return made <= self._next[slot] + self.ranks

    def beginning(self, slot: int, number: int) -> tuple[int, bytes] | None:
        """Returns the point from which the slot may start. No rank needs batches before that point, even if other ranks
        are several steps behind this one."""
        return super().beginning(slot, min(number, self.passed(slot)))

    def pack(self, rank: int = DEALT) -> dict[str, Any]:  # noqa: ARG002  the same for all ranks
        """Returns a state's entry for the slots, which is valid for all ranks."""
        taken, given = self._position
        snapshots = [super(Deal, self).beginning(slot, count) for slot, count in enumerate(taken)]
        ends = {slot: batches for slot, batches in self.ends.items() if batches <= taken[slot]}
        return {"rank": DEALT, "taken": taken, **packed(snapshots, given, ends)}
