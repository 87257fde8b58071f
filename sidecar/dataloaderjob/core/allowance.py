"""Limits the time that a loop spends on peers to which it owes nothing. Pure."""

from __future__ import annotations


class Allowance:
    """Time that grows at a constant share of the time that passes, up to a maximum. It begins with the maximum."""

    __slots__ = ("_at", "_left_s", "_most_s", "_share")

    def __init__(self, share: float, most_s: float) -> None:
        self._share, self._most_s = share, most_s
        self._left_s, self._at = most_s, float("-inf")

    def left_s(self, now: float) -> float:
        """Returns the time that may be spent; at most zero if all is spent."""
        self._left_s = min(self._most_s, self._left_s + max(0.0, now - self._at) * self._share)
        self._at = max(self._at, now)
        return self._left_s

    def spend(self, seconds: float) -> None:
        self._left_s -= seconds
