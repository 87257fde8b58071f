"""The dispatcher's data: streams, tickets and their transitions, attempts and feeders.

A *ticket* is a request for one batch of one stream. An *attempt* is one feeder's work on a ticket; a hedged ticket has
two attempts. A feeder's state exists as long as the connection to the feeder is wanted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import Any, NamedTuple

from dataloaderjob.sidecar.dispatch.homes import Slot, Slots

SIZES_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a region: `nbytes` usable bytes at offset `offset`, in whole pages."""

    region: int
    offset: int
    nbytes: int


class Endpoint(NamedTuple):
    """The address of a running feeder process. `instance` is different for each process, so a reused port causes no
    confusion."""

    name: str
    instance: str
    host: str
    port: int
    link: str = ""
    """The key for connections to the feeder, as hexadecimal text; empty if it is the sidecar's own key."""


@dataclass(slots=True)
class Pace:
    """The times, in seconds, that feeders take for a stream's batches. A time begins when the feeder can start the
    batch."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    _typical: float | None = None
    _fresh: int = 0

    def add(self, seconds: float) -> None:
        self.recent.append(seconds)
        self._fresh += 1
        if (
            self._fresh >= 16
            or len(self.recent) < 8
            or (self._typical is not None and seconds > 2 * self._typical)
        ):
            self._typical = None

    @property
    def typical(self) -> float | None:
        """The 90th percentile of the last 64 times, or the upper median of the last four if that is greater. None
        before the first batch."""
        if self._typical is None and self.recent:
            ordered = sorted(self.recent)
            latest = sorted(list(self.recent)[-4:])
            self._typical = max(ordered[int(0.9 * (len(ordered) - 1))], latest[len(latest) // 2])
            self._fresh = 0
        return self._typical


class TicketState(Enum):
    """The state of a ticket."""

    QUEUED = "queued"
    ASKED = "asked"
    READY = "ready"
    FAILED = "failed"


class TicketEvent(Enum):
    ASK = "ask"
    LOSE = "lose"
    FILL = "fill"
    DROP = "drop"
    FAIL = "fail"


TRANSITIONS: dict[tuple[TicketState, TicketEvent], TicketState] = {
    (TicketState.QUEUED, TicketEvent.ASK): TicketState.ASKED,
    (TicketState.ASKED, TicketEvent.ASK): TicketState.ASKED,  # a hedge
    (TicketState.ASKED, TicketEvent.LOSE): TicketState.QUEUED,  # its last attempt is gone
    (TicketState.ASKED, TicketEvent.FILL): TicketState.READY,
    (TicketState.READY, TicketEvent.DROP): TicketState.QUEUED,  # its place was needed by an awaited ticket
    (TicketState.QUEUED, TicketEvent.FAIL): TicketState.FAILED,
    (TicketState.ASKED, TicketEvent.FAIL): TicketState.FAILED,
}


class AttemptState(Enum):
    """The state of an attempt."""

    ASKED = "building"
    ANNOUNCED = "waiting for space"
    GRANTED = "sending"
    RECEIVING = "receiving"


class IllegalTransition(AssertionError):
    """The error for a transition that TRANSITIONS does not contain, which is a bug in this package. Its message
    contains the ticket's history."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request for one batch of one stream."""

    stream: Stream
    number: int
    payload: bytes
    queued_at: float
    state: TicketState = TicketState.QUEUED
    attempts: list[Attempt] = field(default_factory=list)
    first_asked_at: float | None = None
    retries: int = 0
    strikes: int = 0
    ends: list[tuple[str, str, bool | None]] = field(default_factory=list)
    """A row for each strike: the feeder, how its process exited, and True if memory ran out (None while unknown)."""
    unconfirmed: int = 0
    """Number of feeders that were making the ticket's batch when their connections broke. Their processes may have
    exited."""
    probe: bool = False
    position: int | None = None
    """The sample that the last dead feeder was making."""
    noted_at: float = 0.0
    lease: int | None = None
    slot: Slot | None = None
    """The sequence to which a batch of an IterableDataset belongs."""
    number_in_slot: int = 0
    asks: bool = False
    """True if the ticket only asks whether its batch exists: no body is sent."""
    history: list[TicketEvent] = field(default_factory=list)

    @property
    def bundle(self) -> bytes:
        """The id of the session that makes the batch."""
        return self.stream.bundle if self.slot is None else self.slot.bundle

    def move(self, event: TicketEvent) -> None:
        """Makes a transition. Raises IllegalTransition if TRANSITIONS does not contain it."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            steps = ", ".join(e.value for e in self.history[-8:])
            raise IllegalTransition(
                f"ticket {self.number} of stream {self.stream.id}: {event.value} while {self.state.value}, "
                f"after {steps}"
            )
        self.state = after
        self.history.append(event)


@dataclass(slots=True, eq=False)
class Attempt:
    """One feeder's work on a ticket's batch."""

    ticket: Ticket
    feeder: FeederState
    asked_at: float
    extent: Extent | None = None
    state: AttemptState = AttemptState.ASKED
    nbytes: int = 0
    granted_at: float = 0.0
    answered: bool = False
    """True once the batch is made; it may still wait for space."""
    position: int | None = None
    """Position of the sample that is being made, if the feeder reports it (PROBE)."""
    replayed: int = 0
    """Number of the slot's earlier batches that the feeder has rebuilt for this attempt, according to its last
    report."""
    progressed_at: float = 0.0
    """The time of the last report of rebuilt batches."""

    def answer(self, now: float) -> None:
        """Records that the feeder has finished making the batch, and the time that this took. The time begins when the
        feeder could start the batch, and excludes any wait for space."""
        if not self.answered:
            self.answered = True
            self.ticket.stream.pace.add(now - max(self.asked_at, self.feeder.answered_at))
        self.feeder.answered_at = now


@dataclass(slots=True, eq=False)
class FeederState:
    """The state of one feeder process and of the connection to it."""

    endpoint: Endpoint
    down_since: float
    up: bool = False
    filling: bool = True
    """True while the feeder takes tickets: until it has `choose.depth` of them, and again once it is down to half."""
    level: int | None = None
    """The feeder's place in `choose.Ranks`; None if the feeder takes no tickets."""
    draining: bool = False
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)
    chosen: int = 0
    """Number of the feeder's attempts. Tickets of slots are not counted, because each slot has its own builder."""
    load: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    received_at: float = 0.0
    answered_at: float = 0.0
    moved_at: float = 0.0
    """The time at which part of a body last arrived."""
    suspect_since: float | None = None
    is_silent: bool = False
    """True if the feeder is suspect because it went silent while making a slot. Other feeders then make its slots."""
    replace_asked_at: float | None = None
    """The time of the last request to the supervisor to replace this feeder; None while there is no reason to."""
    refused: dict[bytes, str] = field(default_factory=dict)
    """Bundles that this feeder cannot serve, each with the reason."""
    not_loaded: dict[bytes, float] = field(default_factory=dict)
    """bundle that this feeder could not load -> time until which the feeder gets none of the bundle's tickets."""
    load_failures: dict[bytes, int] = field(default_factory=dict)
    """bundle -> number of this feeder's consecutive failures to load it."""
    bundles: set[bytes] = field(default_factory=set)
    """Bundles whose tickets were sent to the feeder."""
    asked_bundles: set[bytes] = field(default_factory=set)
    """Bundles that the feeder has requested since the last tick."""
    why_down: str = ""
    """The reason why the connection last ended or could not be opened."""
    struck: list[Ticket] = field(default_factory=list)
    """Tickets for which this feeder was making a sample when the connection broke."""
    bundle_loads: int = 0
    """Number of bundles that the feeder has loaded, according to its last report."""


@dataclass(slots=True, eq=False)
class Stream:
    """One live iterator of the trainer."""

    id: int
    bundle: bytes
    manifest: bytes
    facts: dict[str, Any]
    window: int
    awaited: int = 0
    """Number of the first ticket that the trainer has not taken, according to its last report."""
    waiting_since: float | None = None
    """The time at which the trainer went to sleep until `awaited` is ready; None while it works or is paused."""
    refused_since: float | None = None
    """The time since which all connected feeders have refused the stream's code."""
    tickets: dict[int, Ticket] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    _queue: list[int] = field(default_factory=list)
    _sizes: deque[int] = field(default_factory=lambda: deque(maxlen=SIZES_REMEMBERED))
    size_hint: int = 0
    """Size, in bytes, of the largest recent batch; 0 before the first batch."""
    slots: Slots = field(default_factory=Slots)
    """Slots that tickets have named; a map-style dataset has none."""

    def enqueue(self, ticket: Ticket) -> None:
        heappush(self._queue if ticket.slot is None else ticket.slot.queue, ticket.number)

    def heads(self) -> list[Ticket]:
        """Returns the lowest queued ticket. If the stream has slots, returns the lowest queued ticket of each slot."""
        if not self.slots.of:
            ticket = self._peek(self._queue)
            return [] if ticket is None else [ticket]
        found = (self._peek(slot.queue) for slot in self.slots.of.values())
        return [ticket for ticket in found if ticket is not None]

    def _peek(self, queue: list[int]) -> Ticket | None:
        while queue:
            ticket = self.tickets.get(queue[0])
            if ticket is not None and ticket.state is TicketState.QUEUED:
                return ticket
            heappop(queue)
        return None

    def manifests(self) -> dict[bytes, bytes]:
        """Returns the manifests of all sessions that make the stream's batches, by bundle id."""
        return {self.bundle: self.manifest, **{slot.bundle: slot.manifest for slot in self.slots.of.values()}}

    def saw_size(self, nbytes: int) -> None:
        dropped = self._sizes[0] if len(self._sizes) == SIZES_REMEMBERED else 0
        self._sizes.append(nbytes)
        if nbytes >= self.size_hint:
            self.size_hint = nbytes
        elif dropped == self.size_hint:
            self.size_hint = max(self._sizes)

    def first_unpublished(self) -> int:
        """Returns the number of the first ticket without a result, which the trainer cannot have passed."""
        number = self.awaited
        while (ticket := self.tickets.get(number)) is not None and ticket.state in (
            TicketState.READY,
            TicketState.FAILED,
        ):
            number += 1
        return number

    def wanted(self) -> Ticket | None:
        """Returns the ticket that the sleeping trainer waits for, or None if the trainer is not asleep."""
        return None if self.waiting_since is None else self.tickets.get(self.awaited)


@dataclass(slots=True)
class Counters:
    """Counts since the receiver started."""

    batches: int = 0
    nbytes: int = 0
    attempts: int = 0
    retries: int = 0
    hedges: int = 0
    late_copies: int = 0
    failures: int = 0
    feeders_lost: int = 0
