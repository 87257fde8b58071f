"""When is a feeder late? All judgements of lateness, as pure functions of what was seen.

User code may take any time, so lateness is judged against what batches of the same stream took lately;
liveness pings would be silent whenever user code holds the interpreter lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

OVERDUE_FLOOR_S = 1.5
"""No feeder is suspected sooner: with the tick and one batch made anew this keeps a wait below 3 s."""
OVERDUE_FACTOR = 4.0
HEDGE_FLOOR_S = 0.25
HEDGE_FACTOR = 3.0
HEDGE_SHARE = 0.05
"""At most this share of tickets is asked of a second feeder only because the first is slow."""
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
