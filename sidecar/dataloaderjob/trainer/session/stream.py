"""One live iterator as the trainer's client sees it, and its tickets as messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataloaderjob.core import frames, ipc
from dataloaderjob.trainer.session.slot_places import Beginnings, Place

MESSAGE_NBYTES = 4 << 20
RECENT = 4
"""Tickets kept after they were taken, besides those that a thread is ahead of what next() has returned."""
TOGETHER = 8
"""Tickets in one message at most: the system call, which wakes the receiver, costs more than all else in a
`next()` whose batch is ready."""


class StreamLeftError(Exception):
    """Internal: nobody wants the batch that is waited for."""


class SlotEndedError(Exception):
    """Internal: the slot of an IterableDataset has no such batch."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.batches = batches
        """How many it has."""


class SlotGoesOnError(Exception):
    """Internal: there is such a batch, and no more was asked."""


@dataclass(slots=True, eq=False)
class Stream:
    """What was asked for and not taken."""

    id: int
    manifest: str
    window: int
    awaited: int = 0
    pending: dict[int, frames.TicketOfInts | bytes] = field(default_factory=dict)
    """Tickets not taken, sent or not: what is sent again when a sidecar dies. Those of ints are not packed yet: several
    are at a time, while that code is in the caches."""
    recent: list[frames.TicketOfInts | bytes | None] = field(default_factory=lambda: [None] * RECENT)
    """The last tickets taken, each at its number modulo the length."""
    failures: dict[int, bytes] = field(default_factory=dict)
    asked: int = 0
    sent: int = 0
    """Tickets from here to below `asked` are held back."""
    sent_waiting: int | None = None
    """The ticket that the receiver knows us to sleep for."""
    feeders: int = 0
    """Connected when `together` was worked out."""
    together: int = field(init=False)
    """Tickets in one message."""
    late: str = ""
    """What the receiver says of the batch that did not come within the loader's timeout."""
    places: Beginnings | None = None
    """The batches of an IterableDataset; they keep the snapshots of slots that come."""
    left: bool = False
    """Whether its iterator is gone, while a thread may still wait for a batch."""

    def __post_init__(self) -> None:
        self.regroup(0)

    def regroup(self, feeders: int) -> None:
        """Tickets are held back only as far as each feeder has two in hand all the same (`TICKET_DEPTH`)."""
        self.feeders = feeders
        spare = self.window - frames.TICKET_DEPTH * feeders if feeders else self.window // 4
        self.together = max(1, min(TOGETHER, spare))

    def begin_anew(self) -> None:
        """Has the first ticket of each slot say what a receiver cannot know that comes in place of a dead one."""
        told: set[int] = set()
        for number in range(self.awaited, self.asked):
            packed = self.pending[number]
            if self.places is None or not isinstance(packed, bytes):
                return
            ticket = frames.unpack_slot_ticket(packed)
            if ticket is not None and ticket.slot not in told:
                told.add(ticket.slot)
                self.pending[number] = self.places.with_beginning(packed, Place(ticket.slot, ticket.number))

    def messages(self, numbers: range, *, waiting: bool = False) -> list[bytes]:
        """Packets with these pending tickets, in messages of a few MB, each with one ticket at least."""
        if 0 < len(numbers) <= TOGETHER:
            payload = frames.join_tickets_of_ints(numbers, [self.pending[number] for number in numbers])
            if payload is not None and len(payload) <= MESSAGE_NBYTES:
                return self._message(payload, waiting=waiting)
        packets: list[bytes] = []
        group: list[tuple[int, bytes]] = []
        nbytes = 0
        for number in numbers:
            ticket = self.pending[number]
            payload = ticket if type(ticket) is bytes else frames.pack_ticket_of_ints(*ticket)
            if group and nbytes + len(payload) > MESSAGE_NBYTES:
                packets += self._message(frames.join_tickets(group), waiting=waiting)
                group, nbytes = [], 0
            group.append((number, payload))
            nbytes += len(payload)
        return packets + self._message(frames.join_tickets(group), waiting=waiting)

    def _message(self, payload: bytes, *, waiting: bool) -> list[bytes]:
        return ipc.pack(ipc.Type.TICKETS, payload, stream=self.id, ticket=waiting, awaiting=self.awaited)
