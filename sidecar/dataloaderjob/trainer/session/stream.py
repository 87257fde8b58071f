"""One live iterator from the client's point of view, and its tickets as messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataloaderjob.core import frames, ipc, ticket_codec
from dataloaderjob.trainer.session.slot_places import Beginnings, SlotPlace

MESSAGE_NBYTES = 4 << 20
RECENT = 4
"""Number of tickets kept after their batches were taken, in addition to those that a thread takes ahead of next()."""
TOGETHER = 8
"""Maximum number of tickets in one message. The system call, which wakes the receiver, costs more than everything else
in a `next()` whose batch is ready."""


class StreamLeftError(Exception):
    """Internal: no iterator needs the awaited batch any longer."""


class SlotEndedError(Exception):
    """Internal: the slot of an IterableDataset has no such batch."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.batches = batches
        """Number of batches in the slot."""


class SlotGoesOnError(Exception):
    """Internal: the batch exists, and the ticket asked only whether it does."""


@dataclass(slots=True, eq=False)
class Stream:
    """The batches that were requested but not taken."""

    id: int
    manifest: str
    window: int
    awaited: int = 0
    pending: dict[int, ticket_codec.TicketOfInts | bytes] = field(default_factory=dict)
    """Tickets whose batches were not taken, including unsent ones. They are sent again if a sidecar dies. Tickets of
    ints are packed later, several at a time, while the packing code is in the CPU's caches."""
    recent: list[ticket_codec.TicketOfInts | bytes | None] = field(default_factory=lambda: [None] * RECENT)
    """The last tickets taken, each at its number modulo the length."""
    failures: dict[int, ipc.Packet] = field(default_factory=dict)
    """The messages that arrived in place of batches."""
    asked: int = 0
    sent: int = 0
    """Tickets from this number up to, but not including, `asked` are held back."""
    sent_waiting: int | None = None
    """The ticket that this process sleeps for, as last reported to the receiver."""
    feeders: int = 0
    """Number of feeders connected when `together` was computed."""
    together: int = field(init=False)
    """Number of tickets that are sent together in one message."""
    late: str = ""
    """The receiver's report on a batch that did not arrive in time."""
    places: Beginnings | None = None
    """The points at which an IterableDataset's slots may resume, with the snapshots received so far."""
    left: bool = False
    """True if the stream's iterator is gone. A thread may still be waiting for a batch."""

    def __post_init__(self) -> None:
        self.regroup(0)

    def regroup(self, feeders: int) -> None:
        """Computes `together`. Tickets are held back only while each feeder still has `TICKET_DEPTH` of them."""
        self.feeders = feeders
        spare = self.window - frames.TICKET_DEPTH * feeders if feeders else self.window // 4
        self.together = max(1, min(TOGETHER, spare))

    def hear(self, packet: ipc.Packet) -> None:
        """Keeps a slot's snapshot, or the answer to a ticket that yields no batch."""
        if packet.type != ipc.Type.SNAPSHOT:
            self.failures[packet.ticket] = packet
        elif self.places is not None:
            self.places.keep(*frames.unpack_snapshot(packet.payload))

    def begin_anew(self) -> None:
        """Adds the slot's beginning to the first ticket of each slot, because a new receiver does not know it."""
        told: set[int] = set()
        for number in range(self.awaited, self.asked):
            packed = self.pending[number]
            if self.places is None or not isinstance(packed, bytes):
                return
            ticket = ticket_codec.unpack_slot_ticket(packed)
            if ticket is not None and ticket.slot not in told:
                told.add(ticket.slot)
                self.pending[number] = self.places.with_beginning(
                    packed, SlotPlace(ticket.slot, ticket.number)
                )

    def messages(self, numbers: range, *, waiting: bool = False) -> list[bytes]:
        """Returns packets with these pending tickets. A message has at most 4 MiB, unless it contains a single
        ticket."""
        if 0 < len(numbers) <= TOGETHER:
            payload = ticket_codec.join_tickets_of_ints(numbers, [self.pending[number] for number in numbers])
            if payload is not None and len(payload) <= MESSAGE_NBYTES:
                return self._message(payload, waiting=waiting)
        packets: list[bytes] = []
        group: list[tuple[int, bytes]] = []
        nbytes = 0
        for number in numbers:
            ticket = self.pending[number]
            payload = ticket if type(ticket) is bytes else ticket_codec.pack_ticket_of_ints(*ticket)
            if group and nbytes + len(payload) > MESSAGE_NBYTES:
                packets += self._message(ticket_codec.join_tickets(group), waiting=waiting)
                group, nbytes = [], 0
            group.append((number, payload))
            nbytes += len(payload)
        return packets + self._message(ticket_codec.join_tickets(group), waiting=waiting)

    def _message(self, payload: bytes, *, waiting: bool) -> list[bytes]:
        return ipc.pack(ipc.Type.TICKETS, payload, stream=self.id, ticket=waiting, awaiting=self.awaited)
