"""How often a process died lately, and how long to wait before it is started again. Pure: the time comes in."""

from __future__ import annotations

from collections import deque

MAX_DEATHS = 6
"""More of them within DEATHS_WINDOW_S: it will not work the next time either."""
DEATHS_WINDOW_S = 120.0
FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 8.0


class Deaths:
    """Of one process and those that were started in its place."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def died(self, now: float) -> int:
        """Returns how many deaths the window has, this one among them."""
        self._times.append(now)
        while self._times[0] <= now - DEATHS_WINDOW_S:
            self._times.popleft()
        return len(self._times)


def wait_s(deaths: int) -> float:
    """Once is no reason to wait; then twice as long each time, up to LAST_BACKOFF_S."""
    return 0.0 if deaths == 1 else min(FIRST_BACKOFF_S * 2 ** (deaths - 2), LAST_BACKOFF_S)
