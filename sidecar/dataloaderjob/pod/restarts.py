"""When to start the supervisor again, and when that is of no use. Pure: no processes, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_DEATHS = 6
"""More of them within DEATHS_WINDOW_S: a fresh container is tried instead."""
DEATHS_WINDOW_S = 120.0
FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 8.0
EXITS_RAY = frozenset({3, 4})
"""How a supervisor ends that cannot work with its Ray (`feeder.placement`)."""
MAX_RAY_EXITS = 3
"""In a row, with a Ray that seems to live."""


@dataclass(frozen=True, slots=True)
class Again:
    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


class Restarts:
    """Of one process."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()
        self._ray_exits = 0

    def ended(self, code: int, now: float) -> Again | GiveUp:
        """The process ended. Once is no reason to wait, whatever the code: nobody else starts it."""
        self._deaths.append(now)
        while self._deaths[0] <= now - DEATHS_WINDOW_S:
            self._deaths.popleft()
        self._ray_exits = self._ray_exits + 1 if code in EXITS_RAY else 0
        if self._ray_exits >= MAX_RAY_EXITS:
            return GiveUp(f"the supervisor ended {self._ray_exits} times because it cannot work with Ray")
        deaths = len(self._deaths)
        if deaths > MAX_DEATHS:
            return GiveUp(f"the supervisor ended {deaths} times within {DEATHS_WINDOW_S:.0f} s")
        return Again(0.0 if deaths == 1 else min(FIRST_BACKOFF_S * 2 ** (deaths - 2), LAST_BACKOFF_S))
