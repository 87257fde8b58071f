"""Reading from slots. It requests batches in a plan's order, and takes answers up to this rank's next batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.control import W_NEXT_CALLS
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.trainer.epochs.ahead import AheadTaker
from dataloaderjob.trainer.epochs.plans import Plan, SlotAnswer
from dataloaderjob.trainer.session import service
from dataloaderjob.trainer.session.client import Client
from dataloaderjob.trainer.session.slot_places import SlotPlace
from dataloaderjob.trainer.session.stream import SlotEndedError, SlotGoesOnError
from dataloaderjob.trainer.session.taking import NOTHING, Taker

_DIFFERS = (
    "batch {number} of slot {slot} differed when it was rebuilt, so the following batches do not "
    "continue the same sequence: the dataset is not deterministic given its seeds (does it use a clock, "
    "os.urandom, or the order in which processes run?)"
)


@dataclass(frozen=True, slots=True)
class SlotBatches:
    """The properties that all slots' batches share in one epoch."""

    seed: int
    size: int
    bare: bool
    drop_last: bool


class SlotReading:
    """The requests and answers of one epoch."""

    __slots__ = ("_batches", "_client", "_is_ahead", "_placed", "asked", "next", "plan", "read", "taker")

    def __init__(
        self,
        client: Client,
        taker: Taker | AheadTaker,
        plan: Plan[Any],
        batches: SlotBatches,
        *,
        is_ahead: bool,
    ) -> None:
        """`is_ahead` is true if batches are passed to the relay before next() asks for them."""
        self._client, self.taker, self.plan, self._batches = client, taker, plan, batches
        self._is_ahead = is_ahead
        taker.stream.places = plan
        self._placed: dict[int, tuple[SlotPlace, bytes]] = {}
        self.next: SlotAnswer | None = None
        """This rank's next batch, once it has arrived."""
        self.asked = 0
        self.read = 0
        """Number of answers that were taken and counted; -1 while this is unknown."""

    @property
    def has_lost(self) -> bool:
        """True if an answer was taken but not counted, or if the plan counted a batch that was not requested."""
        return self.taker.taken != self.read

    @property
    def is_due(self) -> bool:
        """True if this rank's next batch may be returned."""
        return self.next is not None and self.plan.is_due

    def ask(self, most: int) -> None:
        """Requests those of the next `most` batches that have not been requested yet."""
        read, self.read = self.read, -1
        # An error below this line ends the iterator, which would miss batches that were counted but not requested.
        try:
            self._client.hear()  # otherwise a trainer that never waits would read no snapshots
            while (asked := self.plan.next(most)) is not None:
                self.submit(*asked)
            if self._is_ahead or self.plan.keeps_pace or self.asked < self.taker.taken + most:
                # Otherwise, more tickets will follow, and can be sent in the same message.
                self._client.flush(self.taker.stream)
            if type(self.taker) is AheadTaker:
                self.taker.order(self.asked)
        except ServiceError:  # the next call requests the batches that were counted
            self.read = read
            raise
        self.read = read

    def submit(self, place: SlotPlace, is_wanted: bool) -> None:
        """Requests a batch. Unless `is_wanted`, only asks whether the batch exists."""
        batches, plan, stream = self._batches, self.plan, self.taker.stream
        ticket = ticket_codec.SlotTicket(
            batches.seed, place.number, place.slot, batches.size, batches.bare, batches.drop_last,
            plan.needed(place.slot),
            asks=not is_wanted,
        )  # fmt: skip
        packed = ticket_codec.pack_slot_ticket(ticket)
        if plan.begins(place.slot):
            packed = plan.with_beginning(packed, place)
        stream.pending[self.asked] = packed
        self._placed[self.asked] = place, packed
        self.asked += 1
        stream.asked = self.asked
        if stream.asked - stream.sent >= stream.together:
            self._client.flush(stream)

    def take(self, *, waits: bool) -> bool:
        """Takes the next answer. Returns False if no answer has arrived."""
        plan, taker, answer, is_next = self.plan, self.taker, None, False
        number = taker.taken
        place, packed = self._placed[number]
        try:
            batch = self._take(waits=waits)
            if batch is NOTHING:
                return False
            answer = SlotAnswer(place, packed, batch, taker.digest, None)
        except SlotEndedError as end:
            plan.ended(place, end.batches)
        except SlotGoesOnError:
            plan.there(place)
        except Exception as exc:
            if taker.taken == number or plan.is_lost(place, exc):
                raise
            answer = SlotAnswer(place, packed, None, None, exc.with_traceback(None))
        if answer is not None:
            is_next = plan.there(place, answer.digest)
            if is_next:
                self.next = answer
            elif answer.digest is not None and plan.differs(place, answer.digest):
                service.say_once(_DIFFERS.format(slot=place.slot, number=place.number))
            if self._is_ahead or not is_next:
                self.count_calls(-1)
        del self._placed[number]
        self.read = taker.taken
        return True

    def _take(self, *, waits: bool) -> Any:
        if not self._is_ahead:
            return self.taker.take()
        return self.taker.take_later() if waits else self.taker.take_ready()

    def count_calls(self, more: int) -> None:
        """Corrects the number of next() calls. Every batch that is taken counts as a call."""
        with self._client.lock:  # the thread that sends batches ahead also updates the number
            self._client.control.words[W_NEXT_CALLS] += more

    def took(self) -> tuple[SlotAnswer, Any]:
        """Removes this rank's next batch. Returns it, and the position after it."""
        answer = self.next
        assert answer is not None  # noqa: S101  it is due
        self.next = None
        return answer, self.plan.took(answer.place, answer.digest)
