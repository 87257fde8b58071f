"""States of a feeder's tickets, and what the machine tells its shell. Values and one table.

PARKED     its bundle (the user's code and data) is not here yet
QUEUED     waits for its turn
BUILDING   a builder makes it
DISCARDED  cancelled, or its receiver went, while it was being built
HELD       built, larger than the room that the receiver gave: announced, waits for GRANT
READY      built, its body waits in the connection's output
SENDING    a part of its body is out, or the receiver was told where it lies: it is finished whatever comes
GONE       forgotten
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any


class State(IntEnum):
    PARKED = auto()
    QUEUED = auto()
    BUILDING = auto()
    DISCARDED = auto()
    HELD = auto()
    READY = auto()
    SENDING = auto()
    GONE = auto()


class Event(IntEnum):
    GRANT = auto()
    CANCEL = auto()
    BUNDLE = auto()
    """The bundle is here."""
    BUNDLE_LOST = auto()
    """The bundle cannot be had."""
    BUILD = auto()
    FITS = auto()
    """Built; the body fits the room."""
    EXCEEDS = auto()
    """Built; the body exceeds the room."""
    FAILED = auto()
    """User code failed."""
    LOST = auto()
    """The builder ended."""
    START = auto()
    """The first byte of the body is about to go."""
    SENT = auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.PARKED, Event.GRANT): State.PARKED,
    (State.PARKED, Event.CANCEL): State.GONE,
    (State.PARKED, Event.BUNDLE): State.QUEUED,
    (State.PARKED, Event.BUNDLE_LOST): State.GONE,
    (State.QUEUED, Event.GRANT): State.QUEUED,
    (State.QUEUED, Event.CANCEL): State.GONE,
    (State.QUEUED, Event.BUILD): State.BUILDING,
    (State.QUEUED, Event.FAILED): State.GONE,
    (State.BUILDING, Event.GRANT): State.BUILDING,
    (State.BUILDING, Event.CANCEL): State.DISCARDED,
    (State.BUILDING, Event.FITS): State.READY,
    (State.BUILDING, Event.EXCEEDS): State.HELD,
    (State.BUILDING, Event.FAILED): State.GONE,
    (State.BUILDING, Event.LOST): State.GONE,
    (State.DISCARDED, Event.FITS): State.GONE,
    (State.DISCARDED, Event.EXCEEDS): State.GONE,
    (State.DISCARDED, Event.FAILED): State.GONE,
    (State.DISCARDED, Event.LOST): State.GONE,
    (State.HELD, Event.GRANT): State.READY,
    (State.HELD, Event.CANCEL): State.GONE,
    (State.READY, Event.GRANT): State.READY,
    (State.READY, Event.CANCEL): State.GONE,
    (State.READY, Event.START): State.SENDING,
    (State.SENDING, Event.CANCEL): State.GONE,
    (State.SENDING, Event.SENT): State.GONE,
}
"""(SENDING, CANCEL) is the end of the receiver: a CANCEL frame no longer finds a task that is SENDING."""


class IllegalTransition(Exception):
    """The shell reported what cannot have happened; carries the last events."""

    def __init__(self, task: Task, event: Event, history: Iterable[tuple[int, Event]]) -> None:
        events = [(serial, past.name) for serial, past in history]
        super().__init__(f"{task} cannot take {event.name}; last events (task, event): {events}")


@dataclass(slots=True, eq=False)
class Task:
    """One ticket of one receiver."""

    serial: int
    receiver: int
    stream: int
    ticket: int
    bundle: bytes
    flags: int
    room: int
    """Bytes that may be sent unasked."""
    payload: bytes = field(repr=False)
    """`frames.pack_ticket`; opaque here."""
    state: State
    nbytes: int = 0
    """Size of the built body."""
    body: Any = field(default=None, repr=False)
    """The shell's: what it keeps until the body is sent. Dropped when the task is GONE."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the shell is to do about a task."""

    task: Task


class NeedBundle(Instruction):
    """Ask the task's receiver for its bundle's manifest."""


class Announce(Instruction):
    """Tell the receiver how large the body is."""


class Send(Instruction):
    """Put the body into the connection's output; report START and SENT."""


class Withdraw(Instruction):
    """Take the body, of which no byte has gone, out of the connection's output."""


class Fail(Instruction):
    """Tell the receiver that this ticket failed."""


class Lost(Instruction):
    """Tell the receiver that the process that made this ticket ended."""
