"""The reaper: a separate process that ends all processes of a run if the run's own process is killed. Its command is
`python -m dataloaderjob.local.reaper PID RUN_ID HOME [FOLDER]`.

The reaper has its own session. It waits for the run's own process to end. Then it ends all processes that carry the
run's tag, and removes the run's folder. It also removes a private service's folder, unless another service owns the
folder by then. A run that ends by itself also ends its reaper.

The tag is an environment variable that every process of a run inherits. Processes such as torchrun's workers and Ray's
agents may outlive their parents and leave their sessions, but their initial environment stays readable in /proc. Only
processes of this user are considered. The reaper starts in parallel with the import of torch, and imports only what it
needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dataloaderjob.core import folders, places

GRACE_S = 1.0
EXEC_S = 0.03
"""Seconds before the search is repeated if it has found no process. During execve, a process has no environment for a
moment."""


def command(run_id: str, home: Path, folder: Path | None = None) -> list[str]:
    """Returns the command line of this process's reaper. `folder`: the private service's folder, if this process is
    one."""
    words = [str(os.getpid()), run_id, str(home), *([] if folder is None else [str(folder)])]
    return [sys.executable, "-P", "-m", "dataloaderjob.local.reaper", *words]


def start(
    run_id: str, home: Path, env: Mapping[str, str], folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Starts this process's reaper, with the command line that `command` returns."""
    return subprocess.Popen(
        command(run_id, home, folder), env=dict(env), cwd="/", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> None:
    pid, run_id, home = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if os.getppid() == pid:
        fd = os.pidfd_open(pid)
        if os.getppid() == pid:
            select.select([fd], [], [])
    sweep(run_id, grace_s=GRACE_S)
    folders.remove_tree(home)
    if len(sys.argv) > 4:
        give_up(Path(sys.argv[4]), pid)


def give_up(folder: Path, pid: int) -> None:
    """Removes the files of a private service, unless a service other than `pid` owns the folder."""
    with locked(folder):
        if not is_anothers(folder, pid):
            folders.remove(folder, places.FILES)


def is_anothers(folder: Path, pid: int) -> bool:
    """Returns True if a service other than `pid` owns this folder. This happens if the folder was removed and a rank
    created it again."""
    return service_of(folder) not in (None, pid)


def service_of(folder: Path) -> int | None:
    """Returns the pid of the service that owns this folder; None if there is none."""
    try:
        return int((folder / places.PID_NAME).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock under which ranks start services (`trainer.session.private`)."""
    try:
        fd = os.open(folder / places.LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # the folder was removed
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def tagged(run_id: str, *, but: Iterable[int] = ()) -> list[int]:
    """Returns the pids of the live processes with the tag of this run, except this process and those in `but`."""
    left_out = {os.getpid(), *but}
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if pid not in left_out and _has(pid, run_id)]


def sweep(run_id: str, *, grace_s: float, but: Iterable[int] = ()) -> int:
    """Ends the remaining processes of a run: sends SIGTERM, then SIGKILL after `grace_s` seconds. Returns the number of
    these processes."""
    but = tuple(but)
    found: set[int] = set()
    number, wait_s = signal.SIGTERM, grace_s
    for _ in range(20):  # processes that are being ended may still start others
        pidfds = dict(_open(run_id, but))
        if not pidfds:
            time.sleep(EXEC_S)
            pidfds = dict(_open(run_id, but))
        if not pidfds:
            break
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
        else:  # another process has this pid by now
            os.close(fd)


def _wait(pidfds: Iterable[int], timeout_s: float) -> None:
    left = set(pidfds)
    deadline = time.monotonic() + timeout_s
    while left and (rest := deadline - time.monotonic()) > 0:
        left -= set(select.select(list(left), [], [], rest)[0])


def _has(pid: int, run_id: str) -> bool:
    """Returns True if a process carries the tag; False for a zombie, an ended process, or another user's process."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{places.RUN_VARIABLE}={run_id}".encode() in variables


if __name__ == "__main__":
    main()
