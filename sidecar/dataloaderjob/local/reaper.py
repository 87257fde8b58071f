"""Ends a run whose own process was killed: `python -m dataloaderjob.local.reaper PID RUN_ID HOME [FOLDER]`.

It waits for that process alone, in a session of its own, then ends everything that carries the run's tag
and removes the run's folder, and that of a private service unless another one has it by then. A run that ends by
itself ends its guard, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dataloaderjob.core import folders, places
from dataloaderjob.local import tags

GRACE_S = 1.0


def start(
    run_id: str, home: Path, env: Mapping[str, str], folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """The guard of this process. `folder`: of the private service that this process is."""
    words = [str(os.getpid()), run_id, str(home), *([] if folder is None else [str(folder)])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "dataloaderjob.local.reaper", *words],
        env=dict(env), cwd="/", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> None:
    pid, run_id, home = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    if os.getppid() == pid:
        fd = os.pidfd_open(pid)
        if os.getppid() == pid:
            select.select([fd], [], [])
    tags.sweep(run_id, grace_s=GRACE_S)
    folders.remove_tree(home)
    if len(sys.argv) > 4:
        give_up(Path(sys.argv[4]), pid)


def give_up(folder: Path, pid: int) -> None:
    """Removes the files of a private service, unless another than `pid` has the folder."""
    with locked(folder):
        if service_of(folder) in (None, pid):
            folders.remove(folder, places.FILES)


def service_of(folder: Path) -> int | None:
    """Pid of the service that has this folder; None when none has."""
    try:
        return int((folder / places.PID_NAME).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The lock under which ranks start services (`trainer.private`)."""
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


if __name__ == "__main__":
    main()
