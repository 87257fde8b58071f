"""Restart policy of the service's parts. Pure: no processes, no clock.

The parts are the sidecar, the supervisor and the part that starts feeders: a Ray head, or the feeder host. The sidecar,
the supervisor and the host are restarted independently. If a head's GCS or raylet ends, a new head replaces the head,
and the supervisor is restarted for the new head. If the old head's feeders are alive, the old head is kept until the
new head's feeders are registered. Some feeders thus serve at all times.

    ABSENT    not started, or waiting for a restart
    STARTING  started, not usable yet
    UP        usable
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from dataloaderjob.core.processes import CRASH_WINDOW_S, MAX_CRASHES, Crashes, restart_wait_s
from dataloaderjob.core.supervision import EXITS_RAY

MAX_FIRST_CRASHES = 2
"""The limit that replaces MAX_CRASHES for a part that has never served. The sidecar gets only one attempt, because it
depends on no other part."""
KEEP_OLD_S = 120.0
"""Seconds after which an old head is ended, even if the feeders of the new head are not registered yet."""
MAX_RAY_EXITS = 2
"""The head is replaced after this number of consecutive supervisor exits because of Ray, even if the head seems to be
alive."""


class ServiceState(Enum):
    ABSENT = auto()
    STARTING = auto()
    UP = auto()


class ServicePart(Enum):
    SIDECAR = "sidecar"
    SUPERVISOR = "supervisor"
    HEAD = "Ray head"
    HOST = "feeder host"


class ServiceEvent(Enum):
    START = auto()
    SERVES = auto()
    ENDED = auto()


TRANSITIONS: dict[tuple[ServiceState, ServiceEvent], ServiceState] = {
    (ServiceState.ABSENT, ServiceEvent.START): ServiceState.STARTING,
    (ServiceState.STARTING, ServiceEvent.SERVES): ServiceState.UP,
    (ServiceState.STARTING, ServiceEvent.ENDED): ServiceState.ABSENT,
    (ServiceState.UP, ServiceEvent.ENDED): ServiceState.ABSENT,
}
"""A pair of state and event that is not listed has no effect, because the event arrived late."""


@dataclass(frozen=True, slots=True)
class Start:
    """The instruction to start a part. `number`: the number of the head, either the head to start or the one that the
    supervisor uses."""

    part: ServicePart
    number: int


@dataclass(frozen=True, slots=True)
class StopSupervisor:
    """The instruction to end the supervisor, because its head is gone."""


@dataclass(frozen=True, slots=True)
class StopHead:
    """The instruction to end all processes of a head, including its feeders."""

    number: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


Instruction = Start | StopSupervisor | StopHead | GiveUp


@dataclass(slots=True)
class _Watched:
    part: ServicePart
    state: ServiceState = ServiceState.ABSENT
    start_at: float = float("inf")
    """Time at which the part must be restarted."""
    crashes: Crashes = field(default_factory=Crashes)
    served: bool = False
    """True if the part has ever been UP."""

    def move(self, event: ServiceEvent) -> bool:
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            return False
        self.state = state
        self.served = self.served or state is ServiceState.UP
        return True


class RestartPolicy:
    """The restart policy. Its methods handle events and return instructions, which the caller executes in order."""

    def __init__(self, starter: ServicePart | None = ServicePart.HEAD) -> None:
        """`starter`: the part that starts feeders; None for an existing Ray cluster."""
        self.ray = starter is ServicePart.HEAD
        self.head_number = 0
        """Number of the head in use; the first is 1."""
        self.old: dict[int, float] = {}
        """Replaced heads that still serve, each with the time of its replacement."""
        self.restarts = 0
        self._parts = {
            part: _Watched(part)
            for part in (starter, ServicePart.SIDECAR, ServicePart.SUPERVISOR)
            if part is not None
        }
        self._ray_exits = 0

    def state(self, part: ServicePart) -> ServiceState:
        return self._parts[part].state

    def start(self) -> list[Instruction]:
        """Starts all parts at the same time, the slowest first; with Ray, the supervisor waits for the head."""
        if not self.ray:
            return [self._start(part) for part in self._parts]
        self.head_number = 1
        return [self._start(ServicePart.SIDECAR), self._start(ServicePart.HEAD)]

    def serves(self, part: ServicePart) -> list[Instruction]:
        """Handles the event that a part has become usable."""
        if not self._parts[part].move(ServiceEvent.SERVES):
            return []
        if part is ServicePart.SUPERVISOR:
            self._ray_exits = 0
        return [self._start(ServicePart.SUPERVISOR)] if part is ServicePart.HEAD else []

    def ended(self, part: ServicePart, code: int, why: str, now: float) -> list[Instruction]:
        """Handles the end of the sidecar, the supervisor or the host. `why`: the part's last output."""
        if (
            self.ray
            and part is ServicePart.SUPERVISOR
            and code in EXITS_RAY
            and self.state(ServicePart.HEAD) is ServiceState.UP
        ):
            self._ray_exits += 1
            if self._ray_exits >= MAX_RAY_EXITS:
                self._ray_exits = 0
                self._parts[part].move(ServiceEvent.ENDED)
                return self.head_lost(self.head_number, why, now, feeders_live=True)
        return self._died(self._parts[part], why, now)

    def head_lost(self, number: int, why: str, now: float, *, feeders_live: bool) -> list[Instruction]:
        """Handles the end of a head's GCS or raylet, or its failed start."""
        if number != self.head_number:
            if number in self.old and not feeders_live:
                del self.old[number]
                return [StopHead(number)]
            return []
        head, supervisor = self._parts[ServicePart.HEAD], self._parts[ServicePart.SUPERVISOR]
        was_up = head.state is ServiceState.UP
        instructions: list[Instruction] = []
        if supervisor.state is not ServiceState.ABSENT:
            instructions.append(StopSupervisor())
        supervisor.move(ServiceEvent.ENDED)
        supervisor.start_at = float("inf")
        if was_up and feeders_live:
            self.old[number] = now
        else:
            instructions.append(StopHead(number))
        self.head_number = number + 1
        return instructions + self._died(head, why, now)

    def settled(self) -> list[Instruction]:
        """Returns the instructions to end the old heads. Call it once all wanted feeders of the head in use are
        registered."""
        ended: list[Instruction] = [StopHead(number) for number in self.old]
        self.old.clear()
        return ended

    def due(self, now: float) -> list[Instruction]:
        """Returns the instructions to restart parts and to end old heads that are due."""
        instructions: list[Instruction] = []
        for part in self._parts.values():
            if now >= part.start_at:
                instructions.append(self._start(part.part))
        for number in [n for n, since in self.old.items() if now >= since + KEEP_OLD_S]:
            del self.old[number]
            instructions.append(StopHead(number))
        return instructions

    def _start(self, part: ServicePart) -> Start:
        watched = self._parts[part]
        watched.move(ServiceEvent.START)
        watched.start_at = float("inf")
        return Start(part, self.head_number)

    def _died(self, part: _Watched, why: str, now: float) -> list[Instruction]:
        """Restarts a part that has ended, immediately after its first crash. Gives up if the part crashes too often."""
        if not part.move(ServiceEvent.ENDED):
            return []
        crashes = part.crashes.add(now)
        if crashes > (
            MAX_CRASHES if part.served else 0 if part.part is ServicePart.SIDECAR else MAX_FIRST_CRASHES
        ):
            times = f"{crashes} times within {CRASH_WINDOW_S:.0f} s" if crashes > 1 else "before it served"
            return [GiveUp(f"the {part.part.value} ended {times}: {why or 'it printed nothing'}")]
        self.restarts += 1
        if crashes == 1:
            headless = self.ray and self.state(ServicePart.HEAD) is not ServiceState.UP
            return [] if headless and part.part is ServicePart.SUPERVISOR else [self._start(part.part)]
        part.start_at = now + restart_wait_s(crashes)
        return []
