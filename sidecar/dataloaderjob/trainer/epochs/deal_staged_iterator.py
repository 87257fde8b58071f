"""The iterator of an IterableDataset with `stage=` and `tail=`. All ranks share the batches that the slots have read,
and any feeder makes the batches of a rank's share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dataloaderjob.core.consumption import error_mark
from dataloaderjob.core.errors import DataLoaderJobError, InputError
from dataloaderjob.trainer.epochs.deal_iterator import DealIterator, Hand
from dataloaderjob.trainer.epochs.staged_iterator import HandsOn, Read
from dataloaderjob.trainer.session import slot_places
from dataloaderjob.trainer.session.stream import SlotEndedError, SlotGoesOnError
from dataloaderjob.trainer.session.taking import NOTHING, Unopened


class DealtStagedIterator(HandsOn, DealIterator):
    """Reads steps ahead, and hands on this rank's batch of a step once all batches of the step exist."""

    __slots__ = ("_error", "_is_over", "_line", "_read", "_reader", "_seed", "_waiting_nbytes")

    def _tickets_ahead(self) -> int:
        return super(DealIterator, self)._tickets_ahead()  # all batches that are sent are this rank's

    def _start_both(self) -> None:
        saved = self._saved()
        dealt = self._bundle
        assert dealt is not None  # noqa: S101  shipped before
        # The batches made from this rank's share belong to this rank alone.
        self._bundle = replace(dealt, ranks=0, facts=slot_places.facts(dealt.facts))
        stream = self._open(0, self._window // self._ranks)
        self._bundle = dealt
        reader = self._reader = self._new_taker(0, self._window, Unopened())
        self._begin_deal(reader.stream, saved)
        self._deal.stands(self._deal.mark())
        self._is_over = False
        self._error = ""
        """The error that ends the epoch after what was read."""
        self._begin_line(0)  # the stage draws as in one process, whichever rank has the batch
        self._draw()
        self._epoch.settle()
        self._client.flush(stream)

    def _ask_more(self) -> None:
        self._client.hear()
        # Each ticket shows other ranks what this one has read, so some are asked for whenever a step was given.
        most = self._window - len(self._line) * self._ranks
        while (asked := self._deal.next(most)) is not None:
            self._ask(*asked)

    def _is_left(self) -> bool:
        return not self._is_over

    def _end_epoch(self) -> Any:
        if self._error:
            raise InputError(self._error)
        return super()._end_epoch()

    def _gives(self, first: Read) -> None:
        self._deal.stands(first.mark)

    def _take_read(self, *, waits: bool = False) -> bool:
        if self._reading.taken >= self._drawn:
            self._draw()  # first: batches known to exist may complete the step
        if self._hand is not None and self._deal.is_due:
            self._step(self._hand)
            return True
        if self._reading.taken < self._drawn:
            return self._take_answer(waits=waits)
        if self._line and not self._deal.is_over:
            return False  # no more is read ahead
        read, self._read = self._read, -1  # an error from here on ends the iterator
        try:
            self._is_over = not self._pads()
        except InputError as exc:
            self._is_over, self._error = True, str(exc)
        if self._is_over:
            self._hand = None
        self._read = read
        return True

    def _take_answer(self, *, waits: bool) -> bool:
        """Takes the next answer from a slot. Returns False if none has arrived."""
        deal, reader = self._deal, self._reading
        number = reader.taken
        place, packed = self._placed[number]
        hand: Hand | None = None
        try:
            body = reader.take_later() if waits else reader.take_ready()
            if body is NOTHING:
                return False
            hand = Hand(place, packed, body, reader.digest, None)
        except SlotEndedError as end:
            deal.ended(place, end.batches)
        except SlotGoesOnError:
            deal.there(place)
        except Exception as exc:
            if reader.taken == number or isinstance(exc, DataLoaderJobError):
                raise  # nobody knows which batches of this slot exist
            hand = Hand(place, packed, None, error_mark(exc), exc.with_traceback(None))
        if hand is not None:
            reader.count_calls(-1)
            if deal.there(place):
                self._hand = hand
        del self._placed[number]
        self._read = reader.taken
        return True

    def _step(self, hand: Hand) -> None:
        """Hands on this rank's batch of a step whose batches all exist."""
        read, self._read = self._read, -1  # an error from here on ends the iterator
        self._hand = None
        self._deal.gave(hand.place, None if hand.error else hand.digest)
        self._deal.stepped()
        mark = self._deal.mark()
        if hand.error is not None:
            self._line.append(Read(hand.place, hand.packed, None, error=hand.error, mark=mark))
        else:
            self._submit_read(hand.place, hand.packed, hand.batch, mark)
        self._read = read
