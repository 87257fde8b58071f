"""A limit on the time that a loop spends on peers that have proved nothing. Pure: callers pass the time."""

from __future__ import annotations


class Allowance:
    """A budget of seconds. It begins at its maximum, and is refilled with a constant share of the time that passes."""

    __slots__ = ("_at", "_left_s", "_most_s", "_share")

    def __init__(self, share: float, most_s: float) -> None:
        self._share, self._most_s = share, most_s
        self._left_s, self._at = most_s, float("-inf")

    def left_s(self, now: float) -> float:
        """Returns the seconds that may still be spent. The result is zero or negative if none are left."""
        self._left_s = min(self._most_s, self._left_s + max(0.0, now - self._at) * self._share)
        self._at = max(self._at, now)
        return self._left_s

    def spend(self, seconds: float) -> None:
        self._left_s -= seconds
