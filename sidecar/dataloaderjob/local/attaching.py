"""Trainers that the user starts and attaches to a run. This module has the variables that attach them, the messages
about them, and the policy that stops all feeders while no trainer is attached. It is pure, except `find_attachable`.

    BUSY      feeders run
    STOPPING  the supervisor was asked to stop all feeders
    IDLE      no feeder is wanted until a trainer attaches
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.places import (
    ALLOW_PICKLE_VARIABLE,
    FEEDERS_VARIABLE,
    PREFETCH_VARIABLE,
    RECORD_VARIABLE,
    SOCKET_VARIABLE,
)
from dataloaderjob.local.status import LiveRun, live_runs

VARIABLES = (SOCKET_VARIABLE, FEEDERS_VARIABLE, PREFETCH_VARIABLE, ALLOW_PICKLE_VARIABLE, RECORD_VARIABLE)
"""All environment variables that attach a process. `exports` unsets those that the run does not set, because an earlier
run may have set them."""


def how_to_attach(name: str) -> str:
    """Returns a shell command. Processes that the same shell starts later attach to the run as trainers."""
    return f'eval "$(dataloaderjob env {shlex.quote(name)})"'


def variables(run: LiveRun) -> dict[str, str]:
    """Returns the variables of an attached process. Raises InputError if the run starts its own trainers."""
    attach = run.about.get("attach")
    if attach is None:
        raise InputError(
            f"{run.name} starts its own trainers, so others cannot attach: set spec.trainers.attach "
            "instead of spec.trainers.job in its manifest"
        )
    return {SOCKET_VARIABLE: str(run.about["socket"]), **attach["env"]}


def exports(found: Mapping[str, str]) -> Iterator[str]:
    """Yields sh commands that set these variables, and unset the other variables in VARIABLES."""
    for name, value in found.items():
        yield f"export {name}={shlex.quote(value)}"
    if absent := [name for name in VARIABLES if name not in found]:
        yield f"unset {' '.join(absent)}"


def as_json(found: Mapping[str, str]) -> str:
    return json.dumps(dict(found))


def find_attachable(name: str | None, folder: str | None) -> LiveRun:
    """Returns the live run with this name or folder. If neither is given, returns the only run to which trainers
    attach. Raises InputError, which names the candidates, if there is not exactly one such run."""
    live = [run for run in live_runs(folder) if not run.is_private]
    named = live if name is None else [run for run in live if run.name == name]
    if name is None and folder is None:
        named = [run for run in live if "attach" in run.about] or live
    if len(named) == 1:
        return named[0]
    wanted = "no run" if name is None else f"no run named {name!r}"
    if not named:
        others = ", ".join(run.name for run in live)
        found = f"; found: {others}" if others else ": start one with `dataloaderjob run job.yaml`"
        raise InputError(f"{wanted} of yours is running on this machine{found}")
    which = ", ".join(f"{run.home} ({run.name})" for run in named)
    raise InputError(f"found {len(named)} runs; choose one of them with --dir: {which}")


class Attached:
    """The attached processes, according to the last status of the sidecar."""

    def __init__(self) -> None:
        self._ranks: dict[int, str] = {}
        """Ranks by pid."""

    @property
    def pids(self) -> list[int]:
        return list(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __str__(self) -> str:
        return ", ".join(f"rank {rank} (process {pid})" for pid, rank in self._ranks.items())

    def update(self, receivers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """Compares the sidecar's current receivers with the last ones. Yields a message for each change."""
        now = {int(receiver["trainer"]): str(receiver["rank"]) for receiver in receivers}
        before, self._ranks = self._ranks, now
        for pid in now.keys() - before.keys():
            yield f"rank {now[pid]} (process {pid}) is attached"
        for pid in before.keys() - now.keys():
            yield f"rank {before[pid]} (process {pid}) has left"


class Activity(Enum):
    BUSY = auto()
    STOPPING = auto()
    IDLE = auto()


class Change(Enum):
    EXPIRED = auto()
    """No process has been attached for the configured idle time."""
    STOPPED = auto()
    """The supervisor keeps no feeders."""
    ATTACHED = auto()
    """A process is attached."""
    SCALED = auto()
    """A user has requested feeders although no process is attached."""


TRANSITIONS: dict[tuple[Activity, Change], Activity] = {
    (Activity.BUSY, Change.EXPIRED): Activity.STOPPING,
    (Activity.STOPPING, Change.STOPPED): Activity.IDLE,
    (Activity.STOPPING, Change.ATTACHED): Activity.BUSY,
    (Activity.IDLE, Change.ATTACHED): Activity.BUSY,
    (Activity.IDLE, Change.SCALED): Activity.BUSY,
}
"""A pair of activity and change that is not listed has no effect."""


class Idleness:
    """The policy that stops the feeders of a run after some time without attached trainers, and starts them again."""

    def __init__(self, idle_s: float, now: float) -> None:
        self.activity = Activity.BUSY
        self._idle_s, self._alone_since = idle_s, now
        self._feeders = 0
        """Number of feeders to start again when a process attaches."""

    def look(self, num_attached: int, desired: int | None, now: float) -> int | None:
        """Returns the number of feeders to request, or None for no change. `desired`: the number of feeders that the
        supervisor keeps; None while unknown."""
        if num_attached:
            self._alone_since = now
            return self._feeders if self._move(Change.ATTACHED) else None
        if desired is None:
            return None
        if desired == 0:
            self._move(Change.STOPPED)
        elif self._move(Change.SCALED):
            self._alone_since = now
        elif now - self._alone_since >= self._idle_s and self._move(Change.EXPIRED):
            self._feeders = desired
            return 0
        return None

    def _move(self, change: Change) -> bool:
        state = TRANSITIONS.get((self.activity, change))
        self.activity = state or self.activity
        return state is not None
