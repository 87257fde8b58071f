"""The states of a feeder's tickets, and the state machine's instructions to its shell.

PARKED     its bundle (the user's code and data) is not on this node yet
QUEUED     it waits for its turn
BUILDING   a builder is making its batch
DISCARDED  it was cancelled, or its receiver left, while a builder was making its batch
HELD       its batch is built, but exceeds the room that the receiver granted: it is announced, and waits for GRANT
READY      its batch is built, and waits in the connection's output
SENDING    part of its batch was sent, or the receiver got the batch's location: the transfer is always completed
GONE       it is forgotten
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any


class TaskState(IntEnum):
    PARKED = auto()
    QUEUED = auto()
    BUILDING = auto()
    DISCARDED = auto()
    HELD = auto()
    READY = auto()
    SENDING = auto()
    GONE = auto()


class TaskEvent(IntEnum):
    GRANT = auto()
    CANCEL = auto()
    BUNDLE = auto()
    """The bundle is on this node."""
    BUNDLE_LOST = auto()
    """The bundle cannot be obtained."""
    BUILD = auto()
    FITS = auto()
    """The batch is built, and its body fits into the room."""
    EXCEEDS = auto()
    """The batch is built, but its body exceeds the room."""
    FAILED = auto()
    """User code failed."""
    LOST = auto()
    """The builder died."""
    START = auto()
    """The first byte of the body is about to be sent."""
    SENT = auto()


TRANSITIONS: dict[tuple[TaskState, TaskEvent], TaskState] = {
    (TaskState.PARKED, TaskEvent.GRANT): TaskState.PARKED,
    (TaskState.PARKED, TaskEvent.CANCEL): TaskState.GONE,
    (TaskState.PARKED, TaskEvent.BUNDLE): TaskState.QUEUED,
    (TaskState.PARKED, TaskEvent.BUNDLE_LOST): TaskState.GONE,
    (TaskState.QUEUED, TaskEvent.GRANT): TaskState.QUEUED,
    (TaskState.QUEUED, TaskEvent.CANCEL): TaskState.GONE,
    (TaskState.QUEUED, TaskEvent.BUILD): TaskState.BUILDING,
    (TaskState.QUEUED, TaskEvent.FAILED): TaskState.GONE,
    (TaskState.BUILDING, TaskEvent.GRANT): TaskState.BUILDING,
    (TaskState.BUILDING, TaskEvent.CANCEL): TaskState.DISCARDED,
    (TaskState.BUILDING, TaskEvent.FITS): TaskState.READY,
    (TaskState.BUILDING, TaskEvent.EXCEEDS): TaskState.HELD,
    (TaskState.BUILDING, TaskEvent.FAILED): TaskState.GONE,
    (TaskState.BUILDING, TaskEvent.LOST): TaskState.GONE,
    (TaskState.DISCARDED, TaskEvent.FITS): TaskState.GONE,
    (TaskState.DISCARDED, TaskEvent.EXCEEDS): TaskState.GONE,
    (TaskState.DISCARDED, TaskEvent.FAILED): TaskState.GONE,
    (TaskState.DISCARDED, TaskEvent.LOST): TaskState.GONE,
    (TaskState.HELD, TaskEvent.GRANT): TaskState.READY,
    (TaskState.HELD, TaskEvent.CANCEL): TaskState.GONE,
    (TaskState.READY, TaskEvent.GRANT): TaskState.READY,
    (TaskState.READY, TaskEvent.CANCEL): TaskState.GONE,
    (TaskState.READY, TaskEvent.START): TaskState.SENDING,
    (TaskState.SENDING, TaskEvent.CANCEL): TaskState.GONE,
    (TaskState.SENDING, TaskEvent.SENT): TaskState.GONE,
}
"""CANCEL in the state SENDING means that the receiver is gone, because CANCEL frames do not affect a task that is
SENDING."""


class IllegalTransition(Exception):
    """The error for an event from the shell that cannot have happened. Its message lists the last events."""

    def __init__(self, task: Task, event: TaskEvent, history: Iterable[tuple[int, TaskEvent]]) -> None:
        events = [(serial, past.name) for serial, past in history]
        super().__init__(f"{task} cannot handle {event.name}; last events (task, event): {events}")


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
    """Maximum size, in bytes, of a body that may be sent without a GRANT."""
    payload: bytes = field(repr=False)
    """The result of `ticket_codec.pack_ticket`; opaque to the state machine."""
    state: TaskState
    nbytes: int = 0
    """Size of the built body."""
    body: Any = field(default=None, repr=False)
    """The shell's object for the body. It is kept until the body is sent, and dropped when the task is GONE."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """An action for the shell to take on a task."""

    task: Task


class NeedBundle(Instruction):
    """Ask the task's receiver for the manifest of the task's bundle."""


class Announce(Instruction):
    """Report the size of the body to the receiver."""


class Send(Instruction):
    """Put the body into the connection's output; report START and SENT."""


class Withdraw(Instruction):
    """Remove the body from the connection's output; none of it has been sent."""


class Fail(Instruction):
    """Report to the receiver that this ticket failed."""


class Lost(Instruction):
    """Report to the receiver that the process that was making this ticket has exited."""
