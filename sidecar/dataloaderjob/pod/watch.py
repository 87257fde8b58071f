"""What the main process of a pod waits for: signals, the ends of processes, time. It decides when to start the
supervisor again, and when that is of no use (pure), and reads its folder's state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dataloaderjob.core.backoff import CRASH_WINDOW_S, MAX_CRASHES, Crashes, restart_wait_s
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.supervision import EXITS_RAY
from dataloaderjob.providers.ray.node import RayNode

log = logging.getLogger(__name__)

NODE_FOLDER = "node"
"""Below temp_dir: what is ours and not Ray's."""
_RAYS = ("session_*", "ray_current_cluster")
POLL_S = 0.05


class Stopped(Exception):
    """SIGTERM or SIGINT came: to be unwound, and then the end."""


class Watch:
    """Signals as an event of the main thread's waits. One for a process."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def wait(self, timeout_s: float | None, fds: Iterable[int] = ()) -> set[int]:
        """Those of `fds` that are readable, which a pidfd is once its process ended.

        Raises Stopped as soon as, and whenever after, a signal came.
        """
        ready = set(select.select([self._reader, *fds], [], [], timeout_s)[0])
        if self._reader in ready:
            raise Stopped
        return ready


def fresh_folder(temp_dir: Path) -> Path:
    """Our own folder below `temp_dir`, empty. What an earlier container left in the volume is removed."""
    for path in (*(p for pattern in _RAYS for p in temp_dir.glob(pattern)), temp_dir / NODE_FOLDER):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    folder = temp_dir / NODE_FOLDER
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    return folder


def await_started(
    node: RayNode, watch: Watch, timeout_s: float, what: str, *, check: Callable[[], None] = lambda: None
) -> dict[str, int]:
    """Waits until `ray start` succeeded; returns the pidfds of what the node cannot live without.

    Raises ServiceError when it failed or is late, Stopped, and what `check` raises meanwhile. What Ray printed is
    above, in this process's output.
    """
    deadline = time.monotonic() + timeout_s
    while (code := node.start_code()) is None:
        if time.monotonic() > deadline:
            raise ServiceError(f"{what} was not up after {timeout_s:.0f} s: Ray's lines above may say why")
        check()
        watch.wait(POLL_S)
    if code != 0:
        raise ServiceError(
            f"{what} could not be started, `ray start` ended with code {code}: its lines above say why"
        )
    if not node.alive():
        raise ServiceError(f"{what} ended at once, of its processes there are {sorted(node.pids().values())}")
    return node.vital_pidfds()


MAX_RAY_EXITS = 3
"""In a row, with a Ray that seems to live."""


@dataclass(frozen=True, slots=True)
class Again:
    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


class Restarts:
    """Of one process."""

    def __init__(self) -> None:
        self._crashes = Crashes()
        self._ray_exits = 0

    def ended(self, code: int, now: float) -> Again | GiveUp:
        """The process ended. Once is no reason to wait, whatever the code: nobody else starts it."""
        crashes = self._crashes.add(now)
        self._ray_exits = self._ray_exits + 1 if code in EXITS_RAY else 0
        if self._ray_exits >= MAX_RAY_EXITS:
            return GiveUp(f"the supervisor ended {self._ray_exits} times because it cannot work with Ray")
        if crashes > MAX_CRASHES:
            return GiveUp(f"the supervisor ended {crashes} times within {CRASH_WINDOW_S:.0f} s")
        return Again(restart_wait_s(crashes))
