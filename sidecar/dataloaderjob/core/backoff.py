"""How long to wait before what failed is tried again, and when it is of no use. Pure: the time comes in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first_s`, then twice as long each time, at most `last_s`."""

    first_s: float
    last_s: float

    def wait_s(self, failures: int) -> float:
        """The wait after so many failures in a row, at least one."""
        return min(self.last_s, self.first_s * 2.0 ** min(failures - 1, 30))


MAX_CRASHES = 6
"""More of them within CRASH_WINDOW_S: it will not work the next time either."""
CRASH_WINDOW_S = 120.0
_BACKOFF = Backoff(0.5, 8.0)


class Crashes:
    """Counts the crashes of one process and of those that were started in its place."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def add(self, now: float) -> int:
        """Returns how many the window has, this one among them."""
        self._times.append(now)
        while self._times[0] <= now - CRASH_WINDOW_S:
            self._times.popleft()
        return len(self._times)


def restart_wait_s(crashes: int) -> float:
    """One crash is no reason to wait."""
    return 0.0 if crashes == 1 else _BACKOFF.wait_s(crashes - 1)
