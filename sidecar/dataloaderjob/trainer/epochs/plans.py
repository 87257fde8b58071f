"""The order of an IterableDataset's batches: which slot makes the next batch, and which batches a state counts. This
module is pure.

In torch's order, the slots take turns, each returning one batch, and slots that have ended are skipped. The order
depends only on the lengths of the slots, regardless of when their ends become known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from dataloaderjob.core.errors import ServiceError
from dataloaderjob.trainer.session.slot_places import Beginnings, SlotPlace, packed, shorter

_Mark = TypeVar("_Mark")


class SlotAnswer(NamedTuple):
    """A batch of this rank that a slot has made or read, or the error in its place."""

    place: SlotPlace
    packed: bytes
    """The slot's ticket."""
    batch: Any
    digest: int | None
    """Digest of the batch; None for an error."""
    error: Exception | None


class Plan(Beginnings, Generic[_Mark]):
    """The order of one epoch's batches, and the position of a state in it. Answers arrive in the order of the tickets.

    A `_Mark` is a position between two batches of this rank.
    """

    ranks = 1
    """Number of ranks to which the batches are dealt."""
    keeps_pace = False
    """True if requests must be sent at once, because other ranks depend on them."""

    # Asking

    def next(self, most: int) -> tuple[SlotPlace, bool] | None:
        """Returns the place to request now, and whether this rank wants its batch. Returns None if nothing is left to
        request among the next `most` batches, or if answers must arrive first."""
        raise NotImplementedError

    def needed(self, slot: int) -> int:
        """Returns the number of a slot's first batch that may still be requested, in this epoch or after a resume."""
        raise NotImplementedError

    def begins(self, slot: int) -> bool:
        """Returns True if the next ticket must carry the slot's beginning, because its feeder may not know the slot."""
        raise NotImplementedError

    # Answers

    def there(self, place: SlotPlace, digest: int | None = None) -> bool:
        """Records that a batch exists and, if this rank wants it, that it has arrived. `digest` is None if an error
        arrived in its place. Returns True if the batch is to be returned next."""
        raise NotImplementedError

    def ended(self, place: SlotPlace, batches: int) -> None:
        """Records that this batch does not exist, because its slot has only `batches` batches. Raises ServiceError if a
        later batch of the slot is known to exist."""
        raise NotImplementedError

    def is_lost(self, place: SlotPlace, error: Exception) -> bool:
        """Returns True if this error, which arrived in place of a batch, leaves the order unknown."""
        raise NotImplementedError

    def differs(self, place: SlotPlace, digest: int) -> bool:  # noqa: ARG002  plans without digests of earlier batches
        """Returns True if a batch that was returned before the epoch was resumed now has a different digest."""
        return False

    # Giving

    @property
    def is_due(self) -> bool:
        """True if this rank's batch, which has arrived, may be returned."""
        return True

    @property
    def is_over(self) -> bool:
        """True if nothing is left to request and no answer is outstanding."""
        raise NotImplementedError

    def pads(self) -> bool:
        """Pads the last step, if the plan does so. It is called once nothing is left to request. Returns True if some
        batches are returned twice, so that all ranks get the same number."""
        return False

    def took(self, place: SlotPlace, digest: int | None) -> _Mark:
        """Records that this rank's batch is returned next, or the error in its place if `digest` is None. Returns the
        position after that batch."""
        raise NotImplementedError

    def stands(self, mark: _Mark) -> None:
        """Makes `mark` the position that states contain."""
        raise NotImplementedError

    def pack(self, rank: int) -> dict[str, Any]:
        """Returns a state's entry for the slots."""
        raise NotImplementedError


def counts_before(batches: int, slots: int, ends: Mapping[int, int]) -> list[int]:
    """Returns how many of the first `batches` batches of an epoch belong to each slot. A slot that is not in `ends`
    counts as endless."""
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


class Places(Plan[tuple[SlotPlace, int | None]]):
    """The plan for a rank that receives all batches of its slots, in order. Batches consumed earlier are left out."""

    def __init__(
        self,
        slots: int,
        first: int = 0,
        snapshots: Mapping[int, tuple[int, bytes]] | None = None,
        ends: Mapping[int, int] | None = None,
        expected: Mapping[SlotPlace, int] | None = None,
    ) -> None:
        """`first` is the number of batches consumed earlier. The last of these in each slot is requested again, because
        a slot may turn out to be shorter. In that case, other slots supplied more of the batches.

        `snapshots` holds points from which slots may start. `ends` holds the known lengths of slots, and `expected` the
        digests of batches consumed earlier.
        """
        super().__init__(slots, snapshots)
        self._first = first
        self._expected = expected or {}
        self.ends: dict[int, int] = {slot: n for slot, n in (ends or {}).items() if slot < slots}
        self._proved = [0] * slots
        """Number of batches that are known to exist, by slot."""
        self._probes: deque[SlotPlace] = deque()
        self._unanswered = 0
        self._next: list[int] = []
        """Number of the next batch to request, by slot. Empty until it is known where the epoch resumes."""
        self.digests: list[int | None] = [None] * slots
        """The digest of the last batch that was returned from each slot."""
        self._needed = self.taken[:]
        """The same as `taken`, plus the batches that have arrived and have yet to be returned."""
        self._settle()

    # Asking

    def next(self, most: int) -> tuple[SlotPlace, bool] | None:
        if self._unanswered >= most:
            return None
        if self._probes:
            place = self._probes.popleft()
        else:
            live = [slot for slot in range(len(self._next)) if slot not in self.ends]
            if not live:
                return None
            slot = min(live, key=self._next.__getitem__)
            place = SlotPlace(slot, self._next[slot])
            self._next[slot] += 1
        self._unanswered += 1
        return place, True

    def needed(self, slot: int) -> int:
        return self._needed[slot]

    def begins(self, slot: int) -> bool:
        return not self._needed[slot]

    def known(self, slot: int) -> tuple[int, int] | None:
        digest = self.digests[slot]
        return None if digest is None else (self.taken[slot] - 1, digest)

    def is_asked(self, slot: int, made: int) -> bool:
        return bool(self._next) and made <= self._next[slot]

    # Answers

    def there(self, place: SlotPlace, digest: int | None = None) -> bool:
        self._needed[place.slot] = self._proved[place.slot] = place.number + 1
        if place.is_probe:
            self.stands((place, digest))
        self._answered(place)
        return not place.is_probe

    def ended(self, place: SlotPlace, batches: int) -> None:
        if batches < self._needed[place.slot] or place in self._expected:
            raise shorter(place.slot, batches) from None
        self.ends[place.slot] = batches
        self._answered(place)

    def is_lost(self, place: SlotPlace, error: Exception) -> bool:
        return place.is_probe and isinstance(error, ServiceError)  # the slot's length is unknown

    def differs(self, place: SlotPlace, digest: int) -> bool:
        return self._expected.get(place, digest) != digest

    @property
    def is_over(self) -> bool:
        return not self._unanswered and not self._probes and len(self.ends) == self._slots

    # Giving

    def took(self, place: SlotPlace, digest: int | None) -> tuple[SlotPlace, int | None]:
        return place, digest

    def stands(self, mark: tuple[SlotPlace, int | None]) -> None:
        place, self.digests[place.slot] = mark
        self.taken[place.slot] = place.number + 1

    def _answered(self, place: SlotPlace) -> None:
        self._unanswered -= 1
        if place.is_probe and not self._unanswered and not self._probes:
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

    # State

    def snapshots(self) -> list[tuple[int, bytes] | None]:
        """Returns the points from which slots may start when the epoch is resumed."""
        return [self.beginning(slot, given - 1) for slot, given in enumerate(self._given())]

    def ends_given(self) -> dict[int, int]:
        """Returns the lengths of the slots that have no batch left to return. A resume requests batches of the other
        slots again."""
        given = self._given()
        return {slot: batches for slot, batches in self.ends.items() if batches <= given[slot]}

    def _given(self) -> list[int]:
        before = counts_before(self._first, self._slots, self.ends)
        return [max(taken, count) for taken, count in zip(self.taken, before, strict=True)]

    def pack(self, rank: int) -> dict[str, Any]:
        digests = [self.known(slot) for slot in range(self._slots)]
        return {"rank": rank, **packed(self.snapshots(), digests, self.ends_given())}
