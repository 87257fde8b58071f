"""The private service of this machine, for a trainer whose environment names no sidecar.

One service, keyed by user and run, serves all local ranks of a launch. The first rank starts it, detached, so that it
survives the death of any rank. The others attach. The service exits after its last client, or stays for the next script
(`keeping`). This module only starts the process, finds its socket, and asks it for more feeders. The process runs
`dataloaderjob.local.service`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dataloaderjob.core import folders, ipc
from dataloaderjob.core.errors import ServiceUnavailable, say
from dataloaderjob.core.keep import keep_seconds
from dataloaderjob.core.places import (
    CONTROL_NAME,
    FAILED_NAME,
    FEEDERS_NAME,
    FOLDER_VARIABLE,
    HOST_NAME,
    KEEP_VARIABLE,
    LAUNCH_NAME,
    LOCK_NAME,
    LOG_NAME,
    PATH_VARIABLE,
    PID_NAME,
    REMEDY,
    RUN_VARIABLE,
    SOCKET_NAME,
)
from dataloaderjob.core.processes import last_word, lives, standard_error, start_time
from dataloaderjob.trainer.session import keeping

START_DEADLINE_S = 180.0
LOOK_S = 0.005
_RUN_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "SLURM_STEP_ID",
    "PMI_JOBID",
)

_BELOW_NBYTES = 32
"""Length of the longest path of a socket below the folder of all services."""
_STALE_S = 86_400.0
"""Age after which no rank needs the message of a service that failed."""

_asked = 0
"""Largest number of feeders that this process has requested."""


def run_key() -> str:
    """Returns a name for the launch to which this process belongs. The name is the same in all local ranks.

    Without a launcher's variables, the name depends on the random key that `multiprocessing` passes on to child
    processes. The names of other launches can be guessed, so the ownership of the folder protects the service.
    """
    parts = [f"{name}={os.environ[name]}" for name in _RUN_VARIABLES if name in os.environ]
    if "MASTER_PORT" in os.environ:
        parts.append(f"{os.environ.get('MASTER_ADDR', '')}:{os.environ['MASTER_PORT']}")
    if not parts:
        spawned = multiprocessing.parent_process() is not None
        parts.append(f"pid={os.getppid() if spawned else os.getpid()}")
        parts.append(bytes(multiprocessing.current_process().authkey).hex())
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def folder() -> Path:
    """Returns the folder for the socket and files of this run's service, and creates it if necessary.

    Raises ServiceUnavailable unless the folder belongs to this user alone.
    """
    try:
        return _folder()
    except OSError as exc:
        raise ServiceUnavailable(
            f"the folder {exc.filename or FOLDER_VARIABLE} of the feeders cannot be created ({exc.strerror}): {REMEDY}"
        ) from exc


def _folder() -> Path:
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        base = Path(chosen).absolute()
    else:
        base = _default_base()
        folders.make(base, REMEDY)
    if keep_seconds():
        with folders.room(base, ServiceUnavailable):
            folders.make(base, REMEDY)
            return keeping.home(base, run_key(), _script())
    path = base / run_key()
    folders.make(path, REMEDY)
    folders.mark(path)
    return path


def _default_base() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and folders.is_own(Path(runtime), hidden=True):
        return Path(runtime) / "dataloaderjob"
    name = f"dataloaderjob-{os.getuid()}"
    chosen = Path(tempfile.gettempdir()).absolute() / name
    is_short = len(os.fsencode(chosen)) <= ipc.MAX_PATH_NBYTES - _BELOW_NBYTES
    return chosen if is_short else Path("/tmp") / name  # noqa: S108  checked by folders.make


def start(feeders: int) -> None:
    """Starts the service, or makes the running one start more feeders. Returns at once.

    The service gets the largest number of feeders that any rank has requested. All ranks may call this function at the
    same time. Raises ServiceUnavailable, OSError.
    """
    global _asked
    home, most = folder(), max(feeders, _asked)
    with folders.room(home, ServiceUnavailable), _locked(home):
        wanted = max(most, _wanted(home))
        if lives(home / PID_NAME):
            if wanted > _wanted(home):
                (home / FEEDERS_NAME).write_text(str(wanted))
                _poke(home)
        else:
            for name in (FAILED_NAME, PID_NAME, SOCKET_NAME, CONTROL_NAME, HOST_NAME, FEEDERS_NAME):
                (home / name).unlink(missing_ok=True)
            (home / FEEDERS_NAME).write_text(str(most))
            _remove_failed(home.parent)
            _launch(home, most)
    _asked = most


def _remove_failed(base: Path) -> None:
    """Removes the folders of services that failed a day ago, unless another rank is about to use them."""
    for failed in base.glob(f"*/{FAILED_NAME}"):
        with contextlib.suppress(OSError):
            fd = os.open(failed.parent / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - failed.stat().st_mtime > _STALE_S and not lives(failed.parent / PID_NAME):
                    folders.remove_tree(failed.parent)
            finally:
                os.close(fd)


def ensure(feeders: int) -> None:
    """Starts the service like `start`, but only compares two numbers if no more feeders are needed."""
    if feeders > _asked:
        start(feeders)


def wait() -> str:
    """Waits for the socket of this run's service, and returns its path. Restarts a service that has exited.

    Raises ServiceUnavailable with the service's message.
    """
    start(max(1, _asked))
    home = folder()
    deadline = time.monotonic() + START_DEADLINE_S
    while not (home / SOCKET_NAME).exists():
        if (home / FAILED_NAME).exists():
            raise ServiceUnavailable(
                f"the private service could not start: {(home / FAILED_NAME).read_text().strip()}"
            )
        if not lives(home / PID_NAME):
            raise ServiceUnavailable(
                f"the private service ended while it was starting, and printed {_last_words(home)}"
            )
        if time.monotonic() > deadline:
            raise ServiceUnavailable(
                f"the private service did not start within {START_DEADLINE_S:.0f} s; its log is "
                f"{home / LOG_NAME}"
            )
        time.sleep(LOOK_S)
    return str(home / SOCKET_NAME)


def _last_words(home: Path) -> str:
    try:
        lines = (home / LOG_NAME).read_text(errors="replace").split("\n")
    except OSError:
        lines = []
    return functools.reduce(last_word, lines, "") or "nothing"


def _launch(home: Path, feeders: int) -> None:
    keep_s = keep_seconds()
    command = [
        sys.executable, "-P", "-m", "dataloaderjob.local", "--dir", str(home), "--feeders", str(feeders),
        "--script", _script(), "--launch", run_key(), "--keep", str(keep_s),
    ]  # fmt: skip
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    log = os.open(home / LOG_NAME, flags, 0o600)
    try:
        with standard_error() as echo:
            if echo is not None:  # user code in feeders prints there, as in torch's workers
                command += ["--echo", str(echo)]
            process = _Detached(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=_environment(), pass_fds=() if echo is None else (echo,),
            )  # fmt: skip
    finally:
        os.close(log)
    (home / PID_NAME).write_text(f"{process.pid} {start_time(process.pid)}")
    if keep_s:
        (home / LAUNCH_NAME).write_text(run_key())
    _children.append(process)
    until = f"stay for {keep_s:g} s after this run ({KEEP_VARIABLE})" if keep_s else "end with this run"
    say(f"starting feeders ({feeders}) on this machine; they {until}")


def _script() -> str:
    """Returns a name for this process that the user recognizes."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return f"python -m {str(spec.name).removesuffix('.__main__')}"
    if path is not None:
        return os.path.basename(str(path))
    return "a notebook" if "ipykernel" in sys.modules else "an interactive Python session"


def _wanted(home: Path) -> int:
    """Returns the largest number of feeders that any rank has requested so far."""
    try:
        return int((home / FEEDERS_NAME).read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _poke(home: Path) -> None:
    """Makes the service read the number of feeders. A service that is not listening yet reads it
    once it listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.sendto(b"feeders", str(home / CONTROL_NAME))


_children: list[Any] = []
"""Popen objects of services that this process started. If they were dropped, Python would warn, and reap the processes
at arbitrary times."""


class _Detached(subprocess.Popen[bytes]):
    """A process that is meant to outlive this one, and therefore causes no ResourceWarning."""

    def __del__(self, *_: object, **__: object) -> None: ...


@contextlib.contextmanager
def _locked(home: Path) -> Any:
    """Locks the folder while a service is started. A service also holds the lock while it removes the folder."""
    while True:
        folders.make(home, REMEDY)
        folders.mark(home)
        try:
            fd = os.open(home / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is(fd, home / LOCK_NAME):
                yield
                return
        finally:
            os.close(fd)


def _is(fd: int, path: Path) -> bool:
    """Returns True if `path` still refers to the file open as `fd`. A service that exited may have removed it."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _environment() -> dict[str, str]:
    """Returns the service's environment: the variables for user code in feeders, and this process's import path."""
    environment = dict(os.environ)
    path = sys.path
    if keep_seconds():
        environment, path = keeping.shared(environment), keeping.import_path()
    environment[PATH_VARIABLE] = os.pathsep.join(p for p in path if p)
    environment[RUN_VARIABLE] = secrets.token_hex(8)
    environment["PYTHONHASHSEED"] = (
        os.environ.get("PYTHONHASHSEED") or "0"
    )  # all feeders order sets the same way
    return environment


def _another_process() -> None:
    global _asked
    _asked = 0


os.register_at_fork(after_in_child=_another_process)
