"""The course of a run on one machine, as a table. Pure: `run` carries the actions out.

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


class Phase(Enum):
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
    """The phase's grace is over."""
    ALL_ENDED = auto()


class Action(Enum):
    NOTHING = auto()
    START = auto()
    ASK = auto()
    """Tell trainers to end."""
    KILL = auto()


TABLE: dict[tuple[Phase, Event], tuple[Phase, Action]] = {
    (Phase.PREPARING, Event.SERVED): (Phase.TRAINING, Action.START),
    (Phase.PREPARING, Event.STOP): (Phase.OVER, Action.NOTHING),
    (Phase.TRAINING, Event.FAILED): (Phase.FAILING, Action.NOTHING),
    (Phase.TRAINING, Event.STOP): (Phase.ENDING, Action.ASK),
    (Phase.TRAINING, Event.ALL_ENDED): (Phase.OVER, Action.NOTHING),
    (Phase.FAILING, Event.GRACE): (Phase.ENDING, Action.ASK),
    (Phase.FAILING, Event.STOP): (Phase.ENDING, Action.ASK),
    (Phase.FAILING, Event.ALL_ENDED): (Phase.OVER, Action.NOTHING),
    (Phase.ENDING, Event.GRACE): (Phase.KILLING, Action.KILL),
    (Phase.ENDING, Event.STOP): (Phase.KILLING, Action.KILL),
    (Phase.ENDING, Event.ALL_ENDED): (Phase.OVER, Action.NOTHING),
    (Phase.KILLING, Event.ALL_ENDED): (Phase.OVER, Action.NOTHING),
}
"""A pair that is not here changes nothing."""
GRACE_S = {Phase.FAILING: FAILING_GRACE_S, Phase.ENDING: ENDING_GRACE_S}


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
        self.phase = Phase.PREPARING
        self.stop: Stop | None = None
        self._codes: dict[int, int] = {}
        """Exit codes by the trainers' number, in the order of their ends, as a shell gives them."""
        self._num_trainers = num_trainers

    @property
    def grace_s(self) -> float | None:
        """How long the phase may last, None for ever."""
        return GRACE_S.get(self.phase)

    @property
    def code(self) -> int:
        if self.stop is not None:
            return self.stop.code
        return next((code for code in self._codes.values() if code), EXIT_OK)

    @property
    def first_failure(self) -> tuple[int, int] | None:
        """Number and exit code of the trainer that failed first."""
        return next(((number, code) for number, code in self._codes.items() if code), None)

    def on(self, event: Event) -> Action:
        self.phase, action = TABLE.get((self.phase, event), (self.phase, Action.NOTHING))
        return action

    def halt(self, stop: Stop) -> Action:
        """A signal, a deadline, or a broken service; a second one is less patient."""
        if self.stop is None and self.first_failure is None and self.phase is not Phase.OVER:
            self.stop = stop
        return self.on(Event.STOP)

    def ended(self, number: int, code: int) -> Action:
        """A trainer ended."""
        self._codes[number] = code
        if len(self._codes) == self._num_trainers:
            return self.on(Event.ALL_ENDED)
        return self.on(Event.FAILED) if code else Action.NOTHING
