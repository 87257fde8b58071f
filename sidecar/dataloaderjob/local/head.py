"""Ray heads of a run on this machine. Each has its own folder and its own token, and listens on any free port.

A run has one head in use. After a replacement, it also keeps the previous head while that head's feeders still serve.
`restarts` decides which heads exist; this module starts, watches and ends them. Code shared with a cluster's pods is in
`providers.ray.node`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dataloaderjob.core import folders
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.settings import RayTasks, RayTuning
from dataloaderjob.core.sockets import parse_address
from dataloaderjob.core.supervision import MAX_FEEDERS
from dataloaderjob.local.children import Loop
from dataloaderjob.providers.ray.node import NO_TASKS, RayNode, without_ray

VITAL = ("gcs_server", "raylet")
"""Processes without which a head cannot work."""
UP_S = 120.0
POLL_S = 0.05


class RayHead(RayNode):
    """A Ray head: the GCS, the raylet and their helper processes."""

    def __init__(
        self,
        folder: Path,
        *,
        tuning: RayTuning | None = None,
        tasks: RayTasks = NO_TASKS,
        num_feeders: int = MAX_FEEDERS,
        env: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
    ) -> None:
        """`folder`: `start` creates it; the caller removes it after `stop`. `num_feeders`: the maximum number of
        feeders. `cwd`: the working directory of feeders and their user code; None for `folder`.

        Raises InputError if the folder's path is too long for Ray's Unix sockets.
        """
        super().__init__(
            folder, token_path=folder.absolute() / "token", vital=VITAL, tuning=tuning,
            resources={"feeder": float(num_feeders)}, tasks=tasks,
        )  # fmt: skip
        self._env, self._cwd = env, cwd or self.folder

    @property
    def log_path(self) -> Path:
        """Path of the output of `ray start`."""
        return self.folder / "head.log"

    def start(self) -> None:
        """Starts the processes. Returns before they are up. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        token_path = self.folder / "token"
        if not token_path.exists():
            fd = os.open(token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as out:
                out.write(secrets.token_hex(32))
        options = ["--head", "--no-monitor", "--port=0", "--include-dashboard=false"]
        self.launch(options, env=without_ray(self._env), cwd=self._cwd, log_path=self.log_path)

    def poll_up(self) -> str | None:
        """Returns the address once drivers can connect; None until then. Raises ServiceError if the start failed."""
        if self.start_code() not in (None, 0):
            raise ServiceError(f"Ray's head ended while it started:\n{self._last_lines()}")
        with contextlib.suppress(OSError, ValueError):
            socket.create_connection(parse_address(self.address), timeout=1.0).close()
            self._record()
            return self.address
        return None

    @property
    def address(self) -> str:
        """host:port of the GCS. Raises OSError before the head is up.

        The address is known 2 s before the head is up. However, a driver that connects before the raylet has registered
        retries only every few seconds.
        """
        return self.address_path.read_text().strip()

    def _last_lines(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-20:])
        return "(it printed nothing)"


class Heads:
    """The heads of a run, by number."""

    def __init__(
        self,
        home: Path,
        loop: Loop,
        *,
        env: Mapping[str, str],
        cwd: Path,
        tuning: RayTuning,
        tasks: RayTasks,
        serves: Callable[[], None],
        lost: Callable[[int, str, bool], None],
    ) -> None:
        """`home`: the run's folder, in which each head has a subfolder. `lost`: called when a head cannot be used, with
        its number, the reason, and whether its feeders are alive."""
        self._home, self._loop = home, loop
        self._env, self._cwd, self._tuning, self._tasks = env, cwd, tuning, tasks
        self._serves, self._lost = serves, lost
        self._heads: dict[int, RayHead] = {}
        self._watched: dict[int, list[int]] = {}
        """Pidfds of each head's GCS and raylet."""

    def head(self, number: int) -> RayHead:
        return self._heads[number]

    def start(self, number: int) -> None:
        head = RayHead(
            self._home / f"r{number}", tuning=self._tuning, tasks=self._tasks, env=self._env, cwd=self._cwd
        )
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
                raise ServiceError(
                    f"Ray's head did not start within {UP_S:.0f} s; its log is {head.log_path}"
                )
        except ServiceError as exc:
            self._lost(number, str(exc), False)
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
            self._lost(number, f"{name} ended", live)

        self._loop.watch(pidfd, ended)

    def stop(self, number: int, grace_s: float) -> None:
        """Ends all processes of the head with this number, and removes its folder. Does nothing if there is no such
        head."""
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
