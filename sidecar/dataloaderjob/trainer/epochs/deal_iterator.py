"""The iterator of an IterableDataset with `tail=`: its batches are dealt to all ranks, as `dealing` describes."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

from dataloaderjob.core import frames
from dataloaderjob.core.consumption import error_mark
from dataloaderjob.core.control import MOST_AHEAD
from dataloaderjob.core.errors import DataLoaderJobError, InputError, ServiceError
from dataloaderjob.trainer.epochs.arguments import TAILS
from dataloaderjob.trainer.epochs.dealing import Deal
from dataloaderjob.trainer.epochs.slot_iterator import SlotIterator
from dataloaderjob.trainer.session import slot_places
from dataloaderjob.trainer.session.iterated import Iterated
from dataloaderjob.trainer.session.slot_places import Saved, SlotPlace
from dataloaderjob.trainer.session.stream import SlotEndedError, SlotGoesOnError, Stream

DROP, PAD, ERROR = TAILS
"""Values of `tail`, which determines the treatment of the last batches if there are fewer of them than ranks."""


_numbers = itertools.count(1 << 20)
_of_loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _number_of(loader: Iterated) -> int:
    """Returns this loader's number among the process's loaders that deal batches. Other loaders need not be the same in
    all ranks."""
    if loader not in _of_loaders:
        _of_loaders[loader] = next(_numbers)
    return _of_loaders[loader]


class Hand(NamedTuple):
    """This rank's batch of a step, kept until all batches of the step are known to exist."""

    place: SlotPlace
    packed: bytes
    batch: Any
    digest: int
    error: Exception | None


class DealIterator(SlotIterator):
    """This rank's batches. All ranks have the same number of steps."""

    __slots__ = ("_begun", "_deal", "_hand", "_rank", "_ranks", "_slots_stream", "_tail")

    def ship(self, loader: Iterated) -> None:
        self._tail, self._ranks, self._rank = loader.tail, slot_places.world(), slot_places.rank()
        if self._ranks > MOST_AHEAD:
            raise InputError(f"tail= deals to {MOST_AHEAD} ranks at most, found {self._ranks} (WORLD_SIZE)")
        self._window = min(self._window, MOST_AHEAD // self._ranks) * self._ranks
        super().ship(loader)

    def _session(self, loader: Iterated, facts: dict[str, Any]) -> dict[str, Any]:
        own = {
            **slot_places.facts(facts, are_dealt=True),
            "batches": [self._size, self._bare, self._drop_last, self._tail],
        }
        return {
            "loader": _number_of(loader),
            "env": {"RANK": "0", "WORLD_SIZE": "1"},  # the dataset gives all of its data
            "ranks": self._ranks,
            "facts": own,
        }

    def _tickets_ahead(self) -> int:
        return super()._tickets_ahead() * self._ranks

    def start(self, *, again: bool = False) -> None:  # noqa: ARG002  no sampler is iterated
        saved = self._saved()
        stream = self._open(0)
        self._begin_deal(stream, saved)
        self._draw()
        self._epoch.settle()
        self._client.flush(stream)

    def _saved(self) -> Saved:
        """Returns the state's entry for the slots. The bundle passes that entry to feeders."""
        saved = Saved.of(
            self._epoch.slots, self._epoch.rank, slots=self._slots, allow_pickle=self._pickle_allowed
        )
        if self._first and not saved.taken:
            raise InputError(
                "with tail= an epoch resumes only from what state_dict() returned; a bare number of batches does "
                "not say how many of them are of each slot"
            )
        assert self._bundle is not None  # noqa: S101  shipped before
        self._bundle = replace(self._bundle, taken=tuple(saved.taken))
        return saved

    def _begin_deal(self, stream: Stream, saved: Saved) -> None:
        """Begins to deal. Slots are asked for batches on `stream`."""
        self._slots_stream = stream
        given = {place.slot: (place.number, digest) for place, digest in saved.digests.items()}
        self._deal = stream.places = Deal(
            self._slots, self._ranks, self._rank, first=saved.taken, given=given, snapshots=saved.snapshots,
            ends=saved.ends,
        )  # fmt: skip
        self._placed: dict[int, tuple[SlotPlace, bytes]] = {}
        self._begun: set[int] = set()
        self._hand: Hand | None = None
        self._drawn = self._taken = self._handled = 0

    def _slots_state(self) -> Any:
        deal = getattr(self, "_deal", None)
        return None if deal is None else deal.pack()

    def _draw(self) -> None:
        """Asks for the batches of the steps in the window."""
        self._client.hear()
        while (asked := self._deal.next(self._window)) is not None:
            self._ask(*asked)
        self._sent(is_all=True)

    def _ask(self, place: SlotPlace, is_wanted: bool) -> None:
        deal = self._deal
        ticket = frames.SlotTicket(
            self._epoch_seed, place.number, place.slot, self._size, self._bare, self._drop_last,
            deal.needed(place.slot),
            asks=not is_wanted,
        )  # fmt: skip
        packed = frames.pack_slot_ticket(ticket)
        if place.slot not in self._begun:  # its feeder may not know it yet
            self._begun.add(place.slot)
            packed = deal.with_beginning(packed, place)
        self._submit(self._slots_stream, place, packed)

    def _next_data(self) -> Any:
        while True:
            taker = self._taker
            if taker is None or self._stream is None:
                self._finish()
            if self._hand is not None and self._deal.is_due:
                return self._give_hand(self._hand)
            if taker.taken < self._drawn:
                self._take(taker)
            elif not self._pads():
                self._hand = None
                self._end_epoch()

    def _pads(self) -> bool:
        """Returns True if some batches are returned twice because fewer batches than ranks are left. Raises InputError
        if any are left and `tail` is "error"."""
        if self._deal.is_padded or not self._deal.is_over:
            raise ServiceError("no batch of the step is left to ask for: please report this")
        here = len(self._deal.in_step)
        if here and self._tail == ERROR:
            raise InputError(
                f"{here} batches are left for {self._ranks} ranks at the end of the epoch: tail='drop' leaves them "
                "out, tail='pad' gives some of them twice"
            )
        if not here or self._tail == DROP:
            return False
        place = self._deal.padding()
        if place is not None:
            self._ask(place, True)
            self._sent(is_all=True)
        return True

    def _take(self, taker: Any) -> None:
        """Takes the next answer."""
        number = taker.taken
        place, packed = self._placed[number]
        deal, is_discarded = self._deal, False
        try:
            batch = taker.take()
        except SlotEndedError as end:
            deal.ended(place, end.batches)
        except SlotGoesOnError:
            deal.there(place)
        except Exception as exc:
            if taker.taken == number or isinstance(exc, DataLoaderJobError):
                raise  # nobody knows which batches of this slot exist
            if deal.there(place):
                self._hand = Hand(place, packed, None, error_mark(exc), exc)
            else:
                is_discarded = True
        else:
            if deal.there(place):
                self._hand = Hand(place, packed, batch, taker.digest, None)
            else:
                is_discarded = True
        del self._placed[number]
        if is_discarded:
            self._pass_over(taker.taken)
        else:
            self._passed(taker.taken)

    def _give_hand(self, hand: Hand) -> Any:
        taken, self._handled = self._handled, -1
        self._hand = None
        self._deal.gave(hand.place, None if hand.error else hand.digest)
        self._deal.stepped()
        if hand.error is not None:
            if self._recording is not None:
                self._recording.ask(self._num_yielded, hand.packed)
            self._fail(self._num_yielded, hand.digest)
            self._advance(self._taken)
            self._handled = taken
            raise hand.error
        self._advance(self._taken)
        self._give(hand.packed, hand.digest)
        self._handled = taken
        return hand.batch
