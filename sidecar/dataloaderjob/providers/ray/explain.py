"""Why feeders that are long in coming do not come, from what Ray's GCS says of their actors. Pure.

A worker process that has not registered with its raylet in time is ended and started anew, six times; then the
actor is dead (Ray 2.60). One whose constructor raises is dead at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from dataloaderjob.core.supervision import Cause
from dataloaderjob.providers.provider import Why

REGISTER_MARGIN_S = 1.0
"""The raylet looks at its own clock, and starts the process a moment after it has the actor."""
JOIN_S = 10.0
"""So long a node may take to join Ray: want of room is told as the cause only then."""
DEAD = "DEAD"
_STARTUP_FAILED = "worker startup"
"""In the words of Ray's GCS for a process that never registered."""


class Life(NamedTuple):
    """An actor as the GCS has it."""

    state: str
    """Ray's own name for it, such as PENDING_CREATION."""
    registered: bool
    """A worker process has registered for it."""
    restarts: int = 0
    death: str = ""
    """Why it is dead, its last line; empty while it is not."""
    host: str = ""
    """Address of the node that Ray gave it; empty before."""


class Room(NamedTuple):
    """What the nodes have room for."""

    places: int
    """For so many feeders, those that are there among them."""
    lacking: str
    """What one more would need; empty if nothing is lacking now."""


class Explainer:
    """Remembers since when an actor has had room without a process, or no room."""

    def __init__(self, register_timeout_s: float) -> None:
        self._register_timeout_s = register_timeout_s
        self._starting: dict[int, float] = {}
        self._crowded: dict[int, float] = {}
        """Since when there is no room for it."""

    def explain(
        self, late: Iterable[int], lives: Mapping[int, Life], room: Room, *, taken: int, now: float
    ) -> Iterator[Why]:
        """`late`: feeders that have not reported, in order. `taken`: places of all others that are there."""
        for why in self._explain(sorted(late), lives, room, taken=taken, now=now):
            life = lives.get(why.feeder)
            yield why if life is None else why._replace(host=life.host)

    def _explain(
        self, late: list[int], lives: Mapping[int, Life], room: Room, *, taken: int, now: float
    ) -> Iterator[Why]:
        self._starting, self._crowded = (
            {index: since for index, since in known.items() if index in late}
            for known in (self._starting, self._crowded)
        )
        free = room.places - taken - sum(lives[i].registered for i in late if i in lives)
        for index in late:
            life = lives.get(index)
            if life is None:
                yield Why(index, Cause.STARTS, "Ray does not know it yet")
            elif life.state == DEAD:
                self._starting.pop(index, None)
                yield self._dead(index, life)
            elif life.restarts:
                yield Why(
                    index, Cause.FAILS,
                    "its process or its node ended before it reported, and Ray starts it again: the output of its "
                    "pod, or of this run, says more",
                )  # fmt: skip
            elif life.registered:
                yield Why(index, Cause.STARTS, "its process runs, and has not reported yet")
            elif free <= 0:
                self._starting.pop(index, None)
                joining = now - self._crowded.setdefault(index, now) < JOIN_S
                lacking = room.lacking or "others have taken it"
                text = f"no node has room ({lacking}): add nodes or lower the number of feeders"
                yield Why(index, Cause.STARTS if joining else Cause.NO_ROOM, text)
            else:
                free -= 1
                self._crowded.pop(index, None)
                since = self._starting.setdefault(index, now)
                if now - since > self._register_timeout_s + REGISTER_MARGIN_S:
                    yield Why(index, Cause.REGISTER_TIMEOUT, self._never_registered())
                else:
                    yield Why(
                        index,
                        Cause.STARTS,
                        "Ray has room for it; its process has not registered with Ray yet",
                    )

    def _dead(self, index: int, life: Life) -> Why:
        if _STARTUP_FAILED in life.death:
            return Why(index, Cause.REGISTER_TIMEOUT, self._never_registered(), dead=True)
        return Why(index, Cause.FAILS, f"its process failed at its start: {life.death}", dead=True)

    def _never_registered(self) -> str:
        return (
            f"no worker process of it registered with Ray within worker_register_timeout, "
            f"{self._register_timeout_s:g} s; each one is ended and another started: raise "
            "spec.ray.tuning.workerRegisterTimeoutSeconds. If they crash at their start instead, Ray's log on "
            "their node, raylet.out, says so"
        )
