"""The generations of a job's certificates, and the time at which each begins and ends. Pure.

A certificate is used for one period and is valid for two. So the issuer of the next one may be down for a whole period.
A pod's spec lists all generations from the start, so their number is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

PERIOD = timedelta(days=90)
"""Time for which a generation is used."""
GENERATIONS = 8
"""Number of generations of a job."""
FILES = ("ca.crt", "tls.crt", "tls.key")
"""Files of a generation in a process's folder: the authorities, and the certificate and key of the process."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times at which a job's generations begin."""

    began: datetime
    period: timedelta = PERIOD

    def start(self, generation: int) -> datetime:
        return self.began + generation * self.period

    def end(self, generation: int) -> datetime:
        """Returns the time at which the certificates of a generation expire."""
        return self.start(generation + 2)

    def current(self, now: datetime) -> int:
        """Returns the generation to use now. This is the first one before its start, and the last one after its end."""
        return min(max((now - self.began) // self.period, 0), GENERATIONS - 1)

    def needed(self, now: datetime) -> tuple[int, ...]:
        """Returns the generations that must exist now: starting pods need the first one, and all pods use the current
        one."""
        return tuple(sorted({0, self.current(now)}))

    def next_start(self, now: datetime) -> datetime | None:
        """Returns the time at which the next generation begins, or None if the current one is the last."""
        following = self.current(now) + 1
        return None if following >= GENERATIONS else self.start(following)
