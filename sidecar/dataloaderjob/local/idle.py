"""When a private service ends: after its last client. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LINGER_S = 3.0
"""After the last ring is gone: the next rank, or the next loader of a script, may come."""
UNUSED_S = 120.0
"""Without any client so far; the one that started it may have much to do before its first iter()."""


@dataclass(slots=True)
class Tenancy:
    """Fed with what is seen, from time to time."""

    started: float
    _last_ring: float | None = None
    """When a ring was seen last."""
    _starter_gone: float | None = None

    def see(self, *, rings: int | None, starter_alive: bool, now: float) -> bool:
        """Whether the service should end. `rings`: None while the sidecar does not say.

        Without a client it ends LINGER_S after its starter, or after UNUSED_S; with clients, LINGER_S
        after the last one.
        """
        if not starter_alive and self._starter_gone is None:
            self._starter_gone = now
        if rings is None:
            return False
        if rings:
            self._last_ring = now
            return False
        if self._last_ring is not None:
            return now - self._last_ring >= LINGER_S
        if self._starter_gone is not None:
            return now - self._starter_gone >= LINGER_S
        return now - self.started >= UNUSED_S
