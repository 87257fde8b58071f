"""The private service of this machine, for a trainer that no sidecar was announced to.

One service for all local ranks of a launch, keyed by user and run: the first rank starts it, detached, so
that no rank's death takes it along; the others attach; it ends after its last client. This module only
starts the process and finds its socket; what runs there is `dataloaderjob.local.service`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataloaderjob.core.errors import ServiceUnavailable

START_DEADLINE_S = 180.0
_RUN_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "SLURM_STEP_ID",
    "PMI_JOBID",
)


def run_key() -> str:
    """Names the launch that this process belongs to; the same in all its local ranks."""
    parts = [f"{name}={os.environ[name]}" for name in _RUN_VARIABLES if name in os.environ]
    if "MASTER_PORT" in os.environ:
        parts.append(f"{os.environ.get('MASTER_ADDR', '')}:{os.environ['MASTER_PORT']}")
    if not parts:
        spawned = multiprocessing.parent_process() is not None
        parts.append(f"pid={os.getppid() if spawned else os.getpid()}")
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def folder() -> Path:
    """Where the service of this run keeps its socket and files; private to the user."""
    base = os.environ.get("DATALOADERJOB_DIR") or str(
        Path(tempfile.gettempdir()) / f"dataloaderjob-{os.getuid()}"
    )
    path = Path(base) / run_key()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_uid != os.getuid():
        raise ServiceUnavailable(
            f"{path} belongs to another user: set DATALOADERJOB_DIR to a folder of yours"
        )
    return path


def socket_path() -> Path:
    return folder() / "s"


def start(feeders: int) -> None:
    """Starts the service unless it runs; returns at once. Safe from all ranks at the same time."""
    home = folder()
    with _locked(home):
        if _alive(home):
            return
        for name in ("failed", "pid", "s"):
            (home / name).unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "dataloaderjob.local.service",
            "--dir",
            str(home),
            "--feeders",
            str(feeders),
        ]
        with open(home / "service.log", "ab") as log, _standard_error() as echo:
            if echo is not None:  # where user code in feeders is heard, as that in torch's workers is
                command += ["--echo", str(echo)]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=_environment(), pass_fds=() if echo is None else (echo,),
            )  # fmt: skip
        (home / "pid").write_text(f"{process.pid} {_started(process.pid)}")
        _children.append(process)
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            sys.stderr.write(
                f"[dataloaderjob] starting Ray and feeders ({feeders}) on this machine; they end with this run\n"
            )
            sys.stderr.flush()


def wait() -> str:
    """Waits for the socket of this run's service. Raises ServiceUnavailable with what the service said."""
    home = folder()
    deadline = time.monotonic() + START_DEADLINE_S
    while not (home / "s").exists():
        if (home / "failed").exists():
            raise ServiceUnavailable(
                f"the private service could not start: {(home / 'failed').read_text().strip()}"
            )
        if not _alive(home):
            raise ServiceUnavailable(
                f"the private service ended while it started; its log is {home / 'service.log'}"
            )
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"the private service was not up after {START_DEADLINE_S:.0f} s; its log is {home / 'service.log'}"
            )
        time.sleep(0.02)
    return str(home / "s")


_children: list[Any] = []
"""Popen objects of services that this process started: kept, or Python would warn and reap at random."""


@contextlib.contextmanager
def _locked(home: Path) -> Any:
    """Held while a service is started, and by a service while it removes the folder."""
    while True:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is(fd, home / "lock"):
                yield
                return
        finally:
            os.close(fd)


def _is(fd: int, path: Path) -> bool:
    """Whether `path` still names that file: a service that ended may have removed it."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _standard_error() -> Iterator[int | None]:
    """A descriptor of what this process writes its errors to; None if it has closed it."""
    try:
        fd = os.dup(2)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _alive(home: Path) -> bool:
    try:
        pid, started = (home / "pid").read_text().split()
    except (FileNotFoundError, ValueError):
        return False
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """Start time of a live process: tells it from a later one with its number. Empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _environment() -> dict[str, str]:
    """The service sees what user code in feeders should see, and the import path of this process."""
    environment = dict(os.environ)
    environment["DATALOADERJOB_PATH"] = json.dumps([p for p in sys.path if p])
    return environment
