"""When to start the supervisor again, and when that is of no use. Pure: no processes, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from dataloaderjob.core.backoff import DEATHS_WINDOW_S, MAX_DEATHS, Deaths, wait_s
from dataloaderjob.core.supervision import EXITS_RAY

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
        self._deaths = Deaths()
        self._ray_exits = 0

    def ended(self, code: int, now: float) -> Again | GiveUp:
        """The process ended. Once is no reason to wait, whatever the code: nobody else starts it."""
        deaths = self._deaths.died(now)
        self._ray_exits = self._ray_exits + 1 if code in EXITS_RAY else 0
        if self._ray_exits >= MAX_RAY_EXITS:
            return GiveUp(f"the supervisor ended {self._ray_exits} times because it cannot work with Ray")
        if deaths > MAX_DEATHS:
            return GiveUp(f"the supervisor ended {deaths} times within {DEATHS_WINDOW_S:.0f} s")
        return Again(wait_s(deaths))
