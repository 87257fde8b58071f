"""A private service that outlives its script by DATALOADERJOB_KEEP seconds, to serve the next script.

Feeders keep what they were started with: environment variables, import path, installed packages and resource limits.
Only a script in the same environment therefore takes the service over. The folder's name identifies the environment.
One service serves one launch at a time, and only the service knows whether it is free (`core.claims`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import os
import re
import resource
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dataloaderjob.core import folders, imported
from dataloaderjob.core.claims import FREE, GRANTED, Claim, echo_text
from dataloaderjob.core.errors import ServiceUnavailable, say
from dataloaderjob.core.keep import keep_seconds
from dataloaderjob.core.places import (
    CONTROL_NAME,
    FILES,
    IMPORTED_NAME,
    LAUNCH_NAME,
    LAUNCHERS,
    PID_NAME,
    REMEDY,
)
from dataloaderjob.core.processes import lives, standard_error

ANSWER_S = 5.0
"""Seconds to wait for an answer. A service answers at once, unless the machine is very busy."""
_PREFIX = "k"
_LOCK_NAME = ".keep"
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
LOCK_S = 60.0
LOOK_S = 0.005
MAX_FREE = 2
"""Maximum number of other free services that stay when a service is started."""
LEFTOVER_S = 3600.0
"""Age at which a folder without a service is removed."""
_OF_A_LAUNCH = re.compile(
    rf"(?:LOCAL_|GROUP_|ROLE_)?RANK|MASTER_(?:ADDR|PORT)|TORCHELASTIC_\w+|(?:DATALOADERJOB|{LAUNCHERS})_\w+|"
    r"_|OLDPWD|SHLVL|COLUMNS|LINES|TERM\w*|COLORTERM|LS_COLORS|SSH_\w+|DISPLAY|WINDOWID|TMUX\w*|STY|WINDOW|VTE_VERSION|"
    r"VSCODE_\w+|GIT_ASKPASS|XDG_SESSION_\w+|XDG_VTNR|XDG_SEAT|DBUS_SESSION_BUS_ADDRESS|INVOCATION_ID|JOURNAL_STREAM|"
    r"JPY_\w+|PYTEST_CURRENT_TEST"
)
"""Environment variables that belong to one launch or terminal. Feeders start without them. A script's variables arrive
with its code, except those of its launcher."""
_LIMITS = sorted(
    {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    - {resource.RLIMIT_NOFILE}
)
_NAMESPACES = ("mnt", "net", "pid", "user")
_PACKAGE = Path(folders.__file__).parents[1]
"""The folder of this package."""


def shared(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables for a service that stays: those of its feeders, and this package's own, which
    the service reads."""
    own = "DATALOADERJOB_"
    return {k: v for k, v in variables.items() if k.startswith(own) or not _OF_A_LAUNCH.fullmatch(k)}


def import_path() -> list[str]:
    """Returns the import path for the feeders of a service that stays. It omits the script's own folder, because the
    script's modules are sent with its code."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    own = {"", *([] if main is None else [os.path.dirname(os.path.abspath(main))])}
    with contextlib.suppress(FileNotFoundError):  # the folder was removed
        own.add(os.getcwd())
    return [entry for entry in map(os.fspath, sys.path) if entry not in own]


def home(base: Path, launch: str, script: str) -> Path:
    """Returns the folder in which this launch's service runs or is to be started. `launch` is the launch's name.

    A service that an earlier script left in the same environment is taken over. It must be free, and the files that its
    feeders imported must be unchanged. Raises ServiceUnavailable, InputError, OSError.
    """
    claim = Claim(run=launch, pid=os.getpid(), keep_s=keep_seconds(), script=script)
    prefix = f"{_PREFIX}{environment_key(os.environ)}-"
    with _locked(base):
        found = [path for path in sorted(base.glob(f"{_PREFIX}*-*")) if folders.is_own(path)]
        for path in found:  # a launch keeps its service, even if its environment has changed since
            if _launch_of(path) == launch and _is_joined(path, claim):
                return path
        for path in found:
            if not path.name.startswith(prefix) or not lives(path / PID_NAME):
                continue
            if not imported.is_current(path / IMPORTED_NAME):
                _ask(path, dataclasses.replace(claim, ends=True))
            elif _ask(path, claim) == GRANTED:
                (path / LAUNCH_NAME).write_text(launch)
                until = f"they stay for {claim.keep_s:g} s after this one"
                say(f"using the feeders that an earlier script left; {until}")
                return path
        _make_room(found, claim)
        path = base / f"{prefix}{secrets.token_hex(2)}"
        folders.make(path, REMEDY)
        folders.mark(path)
        (path / LAUNCH_NAME).write_text(launch)
        return path


def _is_joined(path: Path, claim: Claim) -> bool:
    """Returns True if the claim's launch uses the service at `path`, or is about to start it.

    A launch may have the same name as one that has ended. The ended launch's service is taken over like any other.
    """
    answer = _ask(path, dataclasses.replace(claim, joins=True))
    if answer is not None:
        return answer == GRANTED
    if (path / PID_NAME).exists():
        return lives(path / PID_NAME)  # it does not listen yet
    return time.time() - _changed_at(str(path / LAUNCH_NAME)) / 1e9 < LOCK_S


def _make_room(others: Sequence[Path], claim: Claim) -> None:
    """Ends free services beyond MAX_FREE, the least recently claimed first, and removes the folders of dead
    services."""
    alive = [path for path in others if lives(path / PID_NAME)]
    if len(alive) > MAX_FREE:
        probe = dataclasses.replace(claim, joins=True)
        free = [path for path in alive if _ask(path, probe) == FREE]
        for path in sorted(free, key=lambda path: _changed_at(str(path / LAUNCH_NAME)))[:-MAX_FREE]:
            _ask(path, dataclasses.replace(claim, ends=True))
    for path in others:
        if path not in alive and time.time() - _changed_at(str(path)) / 1e9 > LEFTOVER_S:
            folders.remove(path, FILES)


def environment_key(variables: Mapping[str, str]) -> str:
    """Returns ten characters that identify everything that affects the start of this process's feeders."""
    path = import_path()
    parts = [
        sys.executable,
        sorted(item for item in variables.items() if not _OF_A_LAUNCH.fullmatch(item[0])),
        path,
        [_changed_at(entry) for entry in _of_packages(path)],
        max(_changed_at(entry) for entry in _own_files()),
        sorted(os.sched_getaffinity(0)),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        [resource.getrlimit(number) for number in _LIMITS],
        resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # feeders raise the soft limit themselves
        (os.geteuid(), os.getegid(), sorted(os.getgroups())),
        [_link(f"/proc/self/ns/{name}") for name in _NAMESPACES],
        _text("/proc/self/cgroup"),
    ]
    return hashlib.sha256(repr(parts).encode(errors="surrogateescape")).hexdigest()[:10]


def _of_packages(path: Sequence[str]) -> Iterator[str]:
    """Yields the folders of installed packages, and their .pth files. For example, an editable install is a .pth
    file."""
    for folder in path:
        if folder.endswith("-packages"):
            yield folder
            yield from sorted(glob.glob(os.path.join(glob.escape(folder), "*.pth")))


def _own_files() -> Iterator[str]:
    """Yields the Python files of this package, because its developers edit them in place."""
    for folder, _, names in os.walk(_PACKAGE):
        if not folder.endswith("__pycache__"):
            yield from (os.path.join(folder, name) for name in names if name.endswith(".py"))


def _changed_at(path: str) -> int:
    """Returns the time of the path's last modification in nanoseconds, or 0 if the path does not exist. A folder of
    packages changes whenever a package is installed or removed."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _launch_of(path: Path) -> str:
    """Returns the launch that last took over this folder's service, or that started it."""
    return _text(str(path / LAUNCH_NAME))


def _ask(path: Path, claim: Claim) -> bytes | None:
    """Returns the service's answer to a claim. Returns None if the service in this folder does not listen or does not
    answer in time."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        with (
            open(read, "rb", buffering=0) as answers,
            open(write, "wb", buffering=0) as reply,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)
            sock.connect(str(path / CONTROL_NAME))
            socket.send_fds(sock, [claim.pack()], [reply.fileno()])
            reply.close()
            poll = select.poll()
            poll.register(answers, select.POLLIN)
            answer = (answers.read(1) or None) if poll.poll(ANSWER_S * 1000) else None
            if answer == GRANTED and not claim.ends:
                _be_heard(sock, claim)
            return answer
    except OSError:
        return None


def _be_heard(sock: socket.socket, claim: Claim) -> None:
    """Makes the service write to this process's standard error. Does nothing if that is closed or the service has
    exited."""
    with standard_error() as echo, contextlib.suppress(OSError):
        if echo is not None:
            socket.send_fds(sock, [echo_text(claim.run)], [echo])


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Holds a lock while a service is chosen, so that all ranks of a launch choose the same one. Raises
    ServiceUnavailable."""
    path, deadline = base / _LOCK_NAME, time.monotonic() + LOCK_S
    if path.is_symlink():
        raise ServiceUnavailable(f"{path} must be a regular file, but is a symbolic link: remove it")
    fd = os.open(path, _OPEN, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() > deadline:
                    raise ServiceUnavailable(
                        f"another of your scripts has been choosing feeders for {LOCK_S:.0f} s, and holds "
                        f"{base / _LOCK_NAME}: wait for it to finish, or terminate it"
                    ) from exc
                time.sleep(LOOK_S)
        yield
    finally:
        with contextlib.suppress(OSError):  # a child forked in the meantime has the file descriptor, too
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
