"""A run on one machine from its start to its end, as a table. Pure: `run` carries the actions out.

PREPARING  the service is being started; no trainer yet
TRAINING   trainers run
FAILING    one trainer failed; the others may end by themselves, and say why, for a while
ENDING     trainers were told to end
KILLING    trainers were killed
OVER       no trainer lives
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum, auto

FAILING_GRACE_S = 5.0
"""A DDP peer of a failed rank finds out and fails by itself within a second or two."""
ENDING_GRACE_S = 10.0
EXIT_OK = 0
EXIT_BROKEN = 1
EXIT_LATE = 124
"""The exit code of the command `timeout`."""


class State(Enum):
    PREPARING = auto()
    TRAINING = auto()
    FAILING = auto()
    ENDING = auto()
    KILLING = auto()
    OVER = auto()


class Event(Enum):
    SERVED = auto()
    """The sidecar listens."""
    FAILED = auto()
    """A trainer ended with an error, others live."""
    STOP = auto()
    """A signal, a deadline, or the service broke."""
    GRACE = auto()
    """The state's grace is over."""
    ALL_ENDED = auto()


class Action(Enum):
    NOTHING = auto()
    START = auto()
    ASK = auto()
    """Tell trainers to end."""
    KILL = auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.PREPARING, Event.SERVED): State.TRAINING,
    (State.PREPARING, Event.STOP): State.OVER,
    (State.TRAINING, Event.FAILED): State.FAILING,
    (State.TRAINING, Event.STOP): State.ENDING,
    (State.TRAINING, Event.ALL_ENDED): State.OVER,
    (State.FAILING, Event.GRACE): State.ENDING,
    (State.FAILING, Event.STOP): State.ENDING,
    (State.FAILING, Event.ALL_ENDED): State.OVER,
    (State.ENDING, Event.GRACE): State.KILLING,
    (State.ENDING, Event.STOP): State.KILLING,
    (State.ENDING, Event.ALL_ENDED): State.OVER,
    (State.KILLING, Event.ALL_ENDED): State.OVER,
}
"""A pair that is not here changes nothing."""
ENTERING = {State.TRAINING: Action.START, State.ENDING: Action.ASK, State.KILLING: Action.KILL}
"""What is done on the way into a state."""
GRACE_S = {State.FAILING: FAILING_GRACE_S, State.ENDING: ENDING_GRACE_S}


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a run was stopped from outside its trainers."""

    code: int
    why: str
    number: int = signal.SIGTERM
    """What trainers are sent."""


def stopped_by(number: int) -> Stop:
    name = signal.Signals(number).name
    return Stop(128 + number, f"{name} came: ending trainers and service", number)


class Lifecycle:
    """Where a run is. The first reason to end fixes the exit code."""

    def __init__(self, num_trainers: int) -> None:
        self.state = State.PREPARING
        self.stop: Stop | None = None
        self._codes: dict[int, int] = {}
        """Exit codes by the trainers' number, in the order of their ends, as a shell gives them."""
        self._num_trainers = num_trainers

    @property
    def grace_s(self) -> float | None:
        """How long the state may last, None for ever."""
        return GRACE_S.get(self.state)

    @property
    def code(self) -> int:
        if self.stop is not None:
            return self.stop.code
        return next((code for code in self._codes.values() if code), EXIT_OK)

    @property
    def first_failure(self) -> tuple[int, int] | None:
        """Number and exit code of the trainer that failed first."""
        return next(((number, code) for number, code in self._codes.items() if code), None)

    def move(self, event: Event) -> Action:
        """Returns what is to be done."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            return Action.NOTHING
        self.state = state
        return ENTERING.get(state, Action.NOTHING)

    def halt(self, stop: Stop) -> Action:
        """A signal, a deadline, or a broken service; a second one is less patient."""
        if self.stop is None and self.first_failure is None and self.state is not State.OVER:
            self.stop = stop
        return self.move(Event.STOP)

    def ended(self, number: int, code: int) -> Action:
        """A trainer ended."""
        self._codes[number] = code
        if len(self._codes) == self._num_trainers:
            return self.move(Event.ALL_ENDED)
        return self.move(Event.FAILED) if code else Action.NOTHING
