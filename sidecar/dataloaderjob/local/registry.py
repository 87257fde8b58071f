"""Runs of this user that live on this machine, found by the file that each keeps in its folder; and the processes of
a run, found by its tag, an environment variable that all of them inherit.

Processes outlive their parents and leave their sessions (torchrun's workers, Ray's agents), the
environment they were started with stays readable in /proc. Only processes of this user are looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloaderjob.core import folders, supervision
from dataloaderjob.core.errors import DataLoaderJobError, InputError
from dataloaderjob.core.places import RUN_VARIABLE
from dataloaderjob.core.settings import read_key
from dataloaderjob.local.poller import Snapshot, sidecar_status

RUN_FILE = "run.json"
HOME_PREFIX = "dlj-run-"
EXEC_S = 0.03
"""A process has no environment for a moment within execve: what was found empty is read again after this."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run, or a private service, that answers."""

    home: Path
    about: dict[str, Any]

    @property
    def job(self) -> str:
        return str(self.about["job"])

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The supervisor's answer. Raises OSError, ProtocolError, ServiceError."""
        key = read_key(self.home / "key")
        return supervision.ask("127.0.0.1", int(self.about["port"]), key, job=self.job, message=message)

    def snapshot(self) -> Snapshot:
        """What sidecar and supervisor report now; that one of them does not answer is a note."""
        sidecar = sidecar_status(str(self.about["socket"])) or {}
        try:
            supervisor = self.ask({"type": "status"})
        except (OSError, DataLoaderJobError) as exc:
            supervisor = {"notes": [f"the supervisor does not answer: {exc}"]}
        return Snapshot(at=time.monotonic(), sidecar=sidecar, supervisor=supervisor)


def live_runs() -> Iterator[LiveRun]:
    """All of this user's."""
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108  where runs have their folders
        for path in sorted(Path(base).glob(f"{HOME_PREFIX}*/{RUN_FILE}")):
            found = _read(path.parent)
            if found is not None:
                yield found


def runs(folder: str | None) -> list[LiveRun]:
    """The run of this folder if it lives, or all that live."""
    if folder is None:
        return list(live_runs())
    found = _read(Path(folder))
    return [] if found is None else [found]


def find(folder: str | None) -> LiveRun:
    """The run of this folder, or the only one there is. Raises InputError with those that can be chosen."""
    if folder is not None:
        found = _read(Path(folder))
        if found is None:
            raise InputError(f"a live run is needed in {folder}, none was found: see `dataloaderjob status`")
        return found
    live = list(live_runs())
    if len(live) == 1:
        return live[0]
    if not live:
        raise InputError("no run of yours lives on this machine: start one with `dataloaderjob run job.yaml`")
    which = ", ".join(f"{run.home} ({run.job})" for run in live)
    raise InputError(f"one run is needed, found {len(live)}: choose by --dir one of {which}")


def _read(home: Path) -> LiveRun | None:
    try:
        if not folders.is_own(home):
            return None
        about = json.loads((home / RUN_FILE).read_text())
        os.kill(int(about["pid"]), 0)
    except (OSError, ValueError, KeyError):
        return None
    return LiveRun(home, about)


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
