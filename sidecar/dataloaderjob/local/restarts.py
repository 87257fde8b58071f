"""What to do when a part of the service dies. Pure: no processes, no clock.

Parts are the sidecar, the supervisor and what starts feeders: a Ray head, or the feeder host. The sidecar, the
supervisor and the host are started again, each by itself: the supervisor waits for a host.
A head without its GCS or raylet is replaced by a whole new one beside it, and the supervisor is started
again against that; the old one is kept while its feeders live, until those of the new one are registered,
so that somebody serves all the time.

    ABSENT    not started, or waits to be started again
    STARTING  started, cannot be used yet
    UP        can be used
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from dataloaderjob.core.processes import CRASH_WINDOW_S, MAX_CRASHES, Crashes, restart_wait_s
from dataloaderjob.core.supervision import EXITS_RAY

MAX_FIRST_CRASHES = 2
"""MAX_CRASHES for a part that has never served. The sidecar, which needs nobody, has one try."""
KEEP_OLD_S = 120.0
"""An old head is ended after so long, settled or not."""
MAX_RAY_EXITS = 2
"""Exits in a row with a head that seems to live: then the head is replaced."""


class State(Enum):
    ABSENT = auto()
    STARTING = auto()
    UP = auto()


class Part(Enum):
    SIDECAR = "sidecar"
    SUPERVISOR = "supervisor"
    HEAD = "Ray head"
    HOST = "feeder host"


class Event(Enum):
    START = auto()
    SERVES = auto()
    ENDED = auto()


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.ABSENT, Event.START): State.STARTING,
    (State.STARTING, Event.SERVES): State.UP,
    (State.STARTING, Event.ENDED): State.ABSENT,
    (State.UP, Event.ENDED): State.ABSENT,
}
"""A pair that is not here changes nothing: the event came late."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start this part, the head or against the head `number`."""

    part: Part
    number: int


@dataclass(frozen=True, slots=True)
class StopSupervisor:
    """End the supervisor: its head is gone."""


@dataclass(frozen=True, slots=True)
class StopHead:
    """End all processes of that head, feeders included."""

    number: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


Instruction = Start | StopSupervisor | StopHead | GiveUp


@dataclass(slots=True)
class _Watched:
    part: Part
    state: State = State.ABSENT
    start_at: float = float("inf")
    """When to start it again."""
    crashes: Crashes = field(default_factory=Crashes)
    served: bool = False
    """Ever."""

    def move(self, event: Event) -> bool:
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            return False
        self.state = state
        self.served = self.served or state is State.UP
        return True


class RestartPolicy:
    """Events in, instructions out. The caller carries instructions out in order."""

    def __init__(self, *, ray: bool = True) -> None:
        """`ray`: feeders are started by a Ray head."""
        self.ray = ray
        self.head_number = 0
        """Number of the head that is wanted now; 1 is the first."""
        self.old: dict[int, float] = {}
        """Heads that were replaced and still serve, and since when."""
        self.restarts = 0
        starter = Part.HEAD if ray else Part.HOST
        self._parts = {part: _Watched(part) for part in (starter, Part.SIDECAR, Part.SUPERVISOR)}
        self._ray_exits = 0

    def state(self, part: Part) -> State:
        return self._parts[part].state

    def start(self) -> list[Instruction]:
        """All at the same time, what takes longest first; but a supervisor only once a Ray head serves."""
        if not self.ray:
            return [self._start(part) for part in self._parts]
        self.head_number = 1
        return [self._start(Part.SIDECAR), self._start(Part.HEAD)]

    def serves(self, part: Part) -> list[Instruction]:
        """The part can be used."""
        if not self._parts[part].move(Event.SERVES):
            return []
        if part is Part.SUPERVISOR:
            self._ray_exits = 0
        return [self._start(Part.SUPERVISOR)] if part is Part.HEAD else []

    def ended(self, part: Part, code: int, why: str, now: float) -> list[Instruction]:
        """Sidecar, supervisor or host ended. `why`: its last words."""
        if self.ray and part is Part.SUPERVISOR and code in EXITS_RAY and self.state(Part.HEAD) is State.UP:
            self._ray_exits += 1
            if self._ray_exits >= MAX_RAY_EXITS:
                self._ray_exits = 0
                self._parts[part].move(Event.ENDED)
                return self.head_lost(self.head_number, why, now, feeders_live=True)
        return self._died(self._parts[part], why, now)

    def head_lost(self, number: int, why: str, now: float, *, feeders_live: bool) -> list[Instruction]:
        """GCS or raylet of that head ended, or it could not be started."""
        if number != self.head_number:
            if number in self.old and not feeders_live:
                del self.old[number]
                return [StopHead(number)]
            return []
        head, supervisor = self._parts[Part.HEAD], self._parts[Part.SUPERVISOR]
        was_up = head.state is State.UP
        instructions: list[Instruction] = []
        if supervisor.state is not State.ABSENT:
            instructions.append(StopSupervisor())
        supervisor.move(Event.ENDED)
        supervisor.start_at = float("inf")
        if was_up and feeders_live:
            self.old[number] = now
        else:
            instructions.append(StopHead(number))
        self.head_number = number + 1
        return instructions + self._died(head, why, now)

    def settled(self) -> list[Instruction]:
        """The wanted feeders of the head in use are registered: nobody needs the old ones."""
        ended: list[Instruction] = [StopHead(number) for number in self.old]
        self.old.clear()
        return ended

    def due(self, now: float) -> list[Instruction]:
        """What the time asks for."""
        instructions: list[Instruction] = []
        for part in self._parts.values():
            if now >= part.start_at:
                instructions.append(self._start(part.part))
        for number in [n for n, since in self.old.items() if now >= since + KEEP_OLD_S]:
            del self.old[number]
            instructions.append(StopHead(number))
        return instructions

    def _start(self, part: Part) -> Start:
        watched = self._parts[part]
        watched.move(Event.START)
        watched.start_at = float("inf")
        return Start(part, self.head_number)

    def _died(self, part: _Watched, why: str, now: float) -> list[Instruction]:
        """Once is no reason to wait; a part that dies again and again is given up."""
        if not part.move(Event.ENDED):
            return []
        crashes = part.crashes.add(now)
        if crashes > (MAX_CRASHES if part.served else 0 if part.part is Part.SIDECAR else MAX_FIRST_CRASHES):
            times = f"{crashes} times within {CRASH_WINDOW_S:.0f} s" if crashes > 1 else "before it served"
            return [GiveUp(f"the {part.part.value} ended {times}: {why or 'it said nothing'}")]
        self.restarts += 1
        if crashes == 1:
            headless = self.ray and self.state(Part.HEAD) is not State.UP
            return [] if headless and part.part is Part.SUPERVISOR else [self._start(part.part)]
        part.start_at = now + restart_wait_s(crashes)
        return []
