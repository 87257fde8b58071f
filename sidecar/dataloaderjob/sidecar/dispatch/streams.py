"""Records of the dispatcher: streams, tickets, attempts, connections, and which step may follow which.

A *ticket* is one batch of one stream. An *attempt* is one feeder's copy of it in the making; a hedged ticket
has two. A feeder's state lasts as long as the connection to it is wanted.

When a feeder is late is judged here, too. User code may take any time, so lateness is judged against what batches of
the same stream took lately; liveness pings would be silent whenever user code holds the interpreter lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import Any

from dataloaderjob.sidecar.dispatch.instructions import Endpoint, Extent

OVERDUE_FLOOR_S = 1.5
"""No feeder is suspected sooner: with the tick and one batch made anew this keeps a wait below 3 s."""
OVERDUE_FACTOR = 4.0
HEDGE_FLOOR_S = 0.25
HEDGE_FACTOR = 3.0
HEDGE_SHARE = 0.05
"""No more than this share of tickets is asked of a second feeder only because the first is slow."""
TRANSFER_FLOOR_S = 1.5
"""A granted body of which nothing came for so long is given up and asked again. Not a rate: many feeders
share one network, and a slow one is not a dead one."""
REPLACE_AFTER_S = 20.0
REPLACE_FACTOR = 10.0
MAX_REASKS = 2
"""A ticket that is late at three feeders is slow itself; it waits for its deadline."""
MAX_STRIKES = 3
"""A ticket that was being made when this many feeders died is the cause of their death."""
MAX_LOADS = 3
"""So many feeders that cannot load a bundle fail its tickets; one may only lack a mount that comes later."""
SIZES_REMEMBERED = 32


@dataclass(slots=True)
class Pace:
    """How long batches of one stream take from being a feeder's next one to their answer, in seconds."""

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
        """The 90th percentile of the last 64 batches, or what the last four took if more; None before the first."""
        if self._typical is None and self.recent:
            ordered = sorted(self.recent)
            latest = sorted(list(self.recent)[-4:])
            self._typical = max(ordered[int(0.9 * (len(ordered) - 1))], latest[len(latest) // 2])
            self._fresh = 0
        return self._typical


def overdue_after(pace: Pace) -> float | None:
    """Seconds of silence about the batch that it should be making after which a feeder is suspect.

    None while nothing is known: the first batch may load a dataset for minutes.
    """
    typical = pace.typical
    return None if typical is None else max(OVERDUE_FLOOR_S, OVERDUE_FACTOR * typical)


def hedge_after(pace: Pace) -> float | None:
    typical = pace.typical
    return None if typical is None else max(HEDGE_FLOOR_S, HEDGE_FACTOR * typical)


def hedge_allowed(hedges: int, tickets: int) -> bool:
    return hedges < 1 + HEDGE_SHARE * tickets


def replace_after(pace: Pace) -> float:
    """Seconds of silence of a suspect after which its process is replaced."""
    return max(REPLACE_AFTER_S, REPLACE_FACTOR * (pace.typical or 0.0))


def healthy(waiting_s: float, limit_s: float) -> bool:
    """Whether a feeder that has waited so long on its batch shows that the others' lateness is their own."""
    return waiting_s < limit_s / 2


def all_slow(late: int, feeders: int) -> bool:
    """More than half of the feeders late at once: the work is slow, not the feeders."""
    return feeders > 1 and late * 2 > feeders


class State(Enum):
    """State of a ticket."""

    QUEUED = "queued"
    ASKED = "asked"
    READY = "ready"
    FAILED = "failed"


class Event(Enum):
    ASK = "ask"
    LOSE = "lose"
    FILL = "fill"
    DROP = "drop"
    FAIL = "fail"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.QUEUED, Event.ASK): State.ASKED,
    (State.ASKED, Event.ASK): State.ASKED,  # a hedge
    (State.ASKED, Event.LOSE): State.QUEUED,  # its last ask is gone
    (State.ASKED, Event.FILL): State.READY,
    (State.READY, Event.DROP): State.QUEUED,  # its place was needed by an awaited ticket
    (State.QUEUED, Event.FAIL): State.FAILED,
    (State.ASKED, Event.FAIL): State.FAILED,
}


class AttemptState(Enum):
    """State of one feeder's copy."""

    ASKED = "building"
    ANNOUNCED = "waiting for space"
    GRANTED = "sending"
    RECEIVING = "receiving"


class IllegalTransition(AssertionError):
    """A step that the table does not have: a defect of ours, told with the ticket's history."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One batch of one stream."""

    stream: Stream
    number: int
    payload: bytes
    queued_at: float
    state: State = State.QUEUED
    attempts: list[Attempt] = field(default_factory=list)
    first_asked_at: float | None = None
    retries: int = 0
    strikes: int = 0
    probe: bool = False
    position: int | None = None
    """Sample that the last dead feeder was making."""
    noted_at: float = 0.0
    lease: int | None = None
    history: list[Event] = field(default_factory=list)

    def move(self, event: Event) -> None:
        """Raises IllegalTransition if the table has no such step."""
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
    """One feeder's copy of a ticket in the making."""

    ticket: Ticket
    feeder: FeederState
    asked_at: float
    extent: Extent | None = None
    state: AttemptState = AttemptState.ASKED
    nbytes: int = 0
    granted_at: float = 0.0
    position: int | None = None
    """Sample being made, if the feeder reports it (PROBE)."""


@dataclass(slots=True, eq=False)
class FeederState:
    """The connection to one feeder process."""

    endpoint: Endpoint
    down_since: float
    up: bool = False
    filling: bool = True
    """Takes tickets until it has `choose.depth` of them, then again when it is down to half."""
    draining: bool = False
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)
    load: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    received_at: float = 0.0
    answered_at: float = 0.0
    moved_at: float = 0.0
    """When a part of a body last came in."""
    suspect_since: float | None = None
    replace_asked: bool = False
    refused: dict[bytes, str] = field(default_factory=dict)
    """Bundles that this feeder cannot serve, and why."""
    not_loaded: set[bytes] = field(default_factory=set)
    """Bundles that could not be loaded there."""
    bundles: set[bytes] = field(default_factory=set)
    """Bundles of which tickets were sent there."""
    bundle_loads: int = 0
    """How often that feeder has loaded a bundle, as it said last."""


@dataclass(slots=True, eq=False)
class Stream:
    """One live iterator of the trainer."""

    id: int
    bundle: bytes
    manifest: bytes
    facts: dict[str, Any]
    window: int
    awaited: int = 0
    """First ticket that the trainer has not taken, as far as it told."""
    waiting_since: float | None = None
    """When the trainer said that it sleeps until `awaited` is ready; None while it works, or is paused."""
    tickets: dict[int, Ticket] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    _queue: list[int] = field(default_factory=list)
    _sizes: deque[int] = field(default_factory=lambda: deque(maxlen=SIZES_REMEMBERED))
    size_hint: int = 0
    """Largest of the last batches, in bytes; 0 before the first."""

    def enqueue(self, ticket: Ticket) -> None:
        heappush(self._queue, ticket.number)

    def peek(self) -> Ticket | None:
        """The lowest queued ticket, or None."""
        queue = self._queue
        while queue:
            ticket = self.tickets.get(queue[0])
            if ticket is not None and ticket.state is State.QUEUED:
                return ticket
            heappop(queue)
        return None

    def saw_size(self, nbytes: int) -> None:
        dropped = self._sizes[0] if len(self._sizes) == SIZES_REMEMBERED else 0
        self._sizes.append(nbytes)
        if nbytes >= self.size_hint:
            self.size_hint = nbytes
        elif dropped == self.size_hint:
            self.size_hint = max(self._sizes)

    def first_unpublished(self) -> int:
        """The ticket that the trainer cannot have passed."""
        number = self.awaited
        while (ticket := self.tickets.get(number)) is not None and ticket.state in (
            State.READY,
            State.FAILED,
        ):
            number += 1
        return number

    def wanted(self) -> Ticket | None:
        """The ticket that the trainer sleeps for."""
        return None if self.waiting_since is None else self.tickets.get(self.awaited)
