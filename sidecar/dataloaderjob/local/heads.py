"""The Ray heads of one run: the one in use, and one that was replaced and whose feeders still serve.

`restarts` decides which are there; this module starts, watches and ends them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from dataloaderjob.core import folders
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.settings import RayTuning
from dataloaderjob.core.supervision import MAX_FEEDERS
from dataloaderjob.local.head import RayHead
from dataloaderjob.local.loop import Loop

UP_S = 120.0
POLL_S = 0.05


class Lost(Protocol):
    """A head cannot be used any more, or not at all."""

    def __call__(self, number: int, why: str, *, feeders_live: bool) -> None: ...


class Heads:
    """By number."""

    def __init__(
        self,
        home: Path,
        loop: Loop,
        *,
        env: Mapping[str, str],
        cwd: Path,
        tuning: RayTuning,
        serves: Callable[[], None],
        lost: Lost,
    ) -> None:
        """`home`: a folder of ours in which each head has one."""
        self._home, self._loop = home, loop
        self._env, self._cwd, self._tuning = env, cwd, tuning
        self._serves, self._lost = serves, lost
        self._heads: dict[int, RayHead] = {}
        self._watched: dict[int, list[int]] = {}
        """Pidfds of each head's GCS and raylet."""

    def head(self, number: int) -> RayHead:
        return self._heads[number]

    def start(self, number: int) -> None:
        head = RayHead(
            self._home / f"r{number}", tuning=self._tuning, resources={"feeder": float(MAX_FEEDERS)},
            base_env=self._env, cwd=self._cwd,
        )  # fmt: skip
        self._heads[number] = head
        head.start()
        self._await(number, time.monotonic() + UP_S)

    def _await(self, number: int, deadline: float) -> None:
        head = self._heads.get(number)
        if head is None:
            return
        try:
            up = head.poll_up() is not None and len(head.vital_pidfds()) == 2
            if not up and time.monotonic() > deadline:
                raise ServiceError(f"Ray's head was not up after {UP_S:.0f} s; its log is {head.log_path}")
        except ServiceError as exc:
            self._lost(number, str(exc), feeders_live=False)
            return
        if not up:
            self._loop.later(POLL_S, lambda: self._await(number, deadline))
            return
        for name, pidfd in head.vital_pidfds().items():
            self._watch(number, name, os.dup(pidfd))
        self._serves()

    def _watch(self, number: int, name: str, pidfd: int) -> None:
        self._watched.setdefault(number, []).append(pidfd)

        def ended() -> None:
            self._loop.unwatch(pidfd)
            live = name != "raylet" and "raylet" in self._heads[number].pids().values()
            self._lost(number, f"{name} ended", feeders_live=live)

        self._loop.watch(pidfd, ended)

    def stop(self, number: int, grace_s: float) -> None:
        """Ends all processes of that head, and removes its folder. One that is not there is fine."""
        head = self._heads.pop(number, None)
        for pidfd in self._watched.pop(number, ()):
            self._loop.unwatch(pidfd)
            os.close(pidfd)
        if head is not None:
            head.stop(grace_s)
            folders.remove_child(self._home, head.folder.name)

    def close(self, grace_s: float) -> None:
        for number in list(self._heads):
            self.stop(number, grace_s)
