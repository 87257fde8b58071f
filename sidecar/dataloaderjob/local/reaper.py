"""The end of all processes of a run, and the process that sees to it when the run's own is killed:
`python -m dataloaderjob.local.reaper PID RUN_ID HOME [FOLDER]`.

It waits for that process alone, in a session of its own, then ends everything that carries the run's tag and removes
the run's folder, and that of a private service unless another one has it by then. A run that ends by itself ends its
reaper, too.

The tag is an environment variable that every process of a run inherits. Processes outlive their parents and leave their
sessions (torchrun's workers, Ray's agents), the environment they were started with stays readable in /proc. Only
processes of this user are looked at. The reaper starts beside the import of torch, and imports no more than it needs.
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
"""A process has no environment for a moment within execve: what was found empty is read again after this."""


def command(run_id: str, home: Path, folder: Path | None = None) -> list[str]:
    """The reaper of this process. `folder`: of the private service that this process is."""
    words = [str(os.getpid()), run_id, str(home), *([] if folder is None else [str(folder)])]
    return [sys.executable, "-P", "-m", "dataloaderjob.local.reaper", *words]


def start(
    run_id: str, home: Path, env: Mapping[str, str], folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Starts the reaper of this process, `command`."""
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
    """Removes the files of a private service, unless another than `pid` has the folder."""
    with locked(folder):
        if not is_anothers(folder, pid):
            folders.remove(folder, places.FILES)


def is_anothers(folder: Path, pid: int) -> bool:
    """Whether another service than `pid` has this folder: somebody removed it, and a rank made it anew."""
    return service_of(folder) not in (None, pid)


def service_of(folder: Path) -> int | None:
    """Pid of the service that has this folder; None when none has."""
    try:
        return int((folder / places.PID_NAME).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The lock under which ranks start services (`trainer.session.private`)."""
    try:
        fd = os.open(folder / places.LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:  # somebody removed the folder
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def tagged(run_id: str, *, but: Iterable[int] = ()) -> list[int]:
    """Pids of the live processes that carry the tag of this run, without this one and those in `but`."""
    left_out = {os.getpid(), *but}
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if pid not in left_out and _has(pid, run_id)]


def sweep(run_id: str, *, grace_s: float, but: Iterable[int] = ()) -> int:
    """Ends what is left of a run: SIGTERM, after `grace_s` SIGKILL. Returns how many there were."""
    but = tuple(but)
    found: set[int] = set()
    number, wait_s = signal.SIGTERM, grace_s
    for _ in range(20):  # what is being ended may still start others
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
        else:  # another process has the number by now
            os.close(fd)


def _wait(pidfds: Iterable[int], timeout_s: float) -> None:
    left = set(pidfds)
    deadline = time.monotonic() + timeout_s
    while left and (rest := deadline - time.monotonic()) > 0:
        left -= set(select.select(list(left), [], [], rest)[0])


def _has(pid: int, run_id: str) -> bool:
    """Whether a process carries the tag: not a zombie, one that is gone, or one of another user."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{places.RUN_VARIABLE}={run_id}".encode() in variables


if __name__ == "__main__":
    main()
