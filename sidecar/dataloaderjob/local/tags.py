"""The tag of a run: an environment variable that every process of it inherits, and the end of all of them.

Processes outlive their parents and leave their sessions (torchrun's workers, Ray's agents), the
environment they were started with stays readable in /proc. Only processes of this user are looked at. It stays apart
from `registry`: the reaper starts beside the import of torch, and needs nothing else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from dataloaderjob.core.places import RUN_VARIABLE

__all__ = ["RUN_VARIABLE", "sweep", "tagged"]

EXEC_S = 0.03
"""A process has no environment for a moment within execve: what was found empty is read again after this."""


def tagged(run_id: str, *, but: Iterable[int] = ()) -> list[int]:
    """Pids of the live processes that carry the tag of this run, without this one and those in `but`."""
    left_out = {os.getpid(), *but}
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if pid not in left_out and _has(pid, run_id)]


def sweep(run_id: str, *, grace_s: float, but: Iterable[int] = ()) -> int:
    """Ends what is left of a run: SIGTERM, after `grace_s` SIGKILL. Returns how many there were."""
    but = tuple(but)
    found: set[int] = set()
    number = signal.SIGTERM
    wait_s = grace_s
    empty_looks = 0
    for _ in range(20):  # what is being ended may still start others
        pidfds = dict(_open(run_id, but))
        if not pidfds:
            empty_looks += 1
            if empty_looks == 2:
                break
            time.sleep(EXEC_S)
            continue
        empty_looks = 0
        found |= set(pidfds)
        for fd in pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
        _wait(pidfds.values(), wait_s)
        for fd in pidfds.values():
            os.close(fd)
        number, wait_s = signal.SIGKILL, 1.0
    return len(found)


def _open(run_id: str, but: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    for pid in tagged(run_id, but=but):
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if _has(pid, run_id):
            yield pid, fd
        else:  # another process has the number by now
            os.close(fd)


def _has(pid: int, run_id: str) -> bool:
    return f"{RUN_VARIABLE}={run_id}".encode() in _environment(pid)


def _wait(pidfds: Iterable[int], timeout_s: float) -> None:
    left = set(pidfds)
    deadline = time.monotonic() + timeout_s
    while left and (rest := deadline - time.monotonic()) > 0:
        left -= set(select.select(list(left), [], [], rest)[0])


def _environment(pid: int) -> list[bytes]:
    """Empty for a zombie, a process that is gone, and one of another user."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
