"""Attaching a trainer process to its sidecar. It dials the socket, exchanges hello and welcome, and explains
failures."""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataloaderjob.core import ipc, sockets
from dataloaderjob.core.errors import ServiceUnavailable, say
from dataloaderjob.core.places import SOCKET_VARIABLE
from dataloaderjob.trainer.session.pool import Pool

DIAL_TIMEOUT_S = 10.0
BUSY_S = 10.0
"""Seconds for which attaching is retried, because a sidecar with too many connections closes the oldest one."""
BUSY_PAUSE_S = 0.05
ABSENCE_DEADLINE_S = 120.0
ABSENCE_NOTE_S = 5.0
ABSENCE_PAUSE_S = 0.05
MAX_ENDS = 10
ENDS_WITHIN_S = 30.0
"""The sidecar counts as defective if it exits MAX_ENDS times within this number of seconds, without a batch in
between."""
Attachment = tuple[socket.socket, dict[str, Any], list[int]]
"""The connection to a sidecar that has accepted this process, the sidecar's settings, and the file descriptors for
control memory and wake-ups."""
_BUSY = frozenset({errno.ECONNRESET, errno.EPIPE, errno.EAGAIN})
_process = os.urandom(8).hex()
"""Distinguishes this process from all others at the sidecar. PIDs may be equal in different containers of a pod."""


class _Closed(ConnectionResetError):
    """The sidecar closed the connection without an answer."""


@dataclass(slots=True, eq=False)
class Opened:
    """The resources that are closed when a client ends.

    The client itself has no `__del__`, which could run in one thread while another thread gets the client from
    `process_clients`. Without `__del__`, the last reference to the client is gone before anything is closed.
    """

    sock: socket.socket | None = None
    fds: list[int] = field(default_factory=list)
    pool: Pool | None = None

    def disconnect(self) -> None:
        sock, self.sock = self.sock, None
        if sock is not None:
            sock.close()

    def close(self) -> None:
        """Closes all file descriptors. Lent batches stay valid. No process is notified when their leases end."""
        if (pool := self.pool) is not None:
            pool.tail.cut()
            for number in list(pool.regions):
                pool.drop(number)
        self.disconnect()
        fds, self.fds = self.fds, []
        for fd in fds[:2] if pool is not None else fds:  # the third is the pool's
            os.close(fd)


def attach(path: str, rank: str, adopt: dict[str, Any] | None, fds: list[int]) -> Attachment:
    """Attaches to the sidecar at `path`. `adopt` and `fds` describe an earlier sidecar's pools, which the new one takes
    over.

    Raises ServiceUnavailable with the reason. Raises OSError or ProtocolError while no suitable sidecar answers.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return _attach(path, rank, adopt, fds)
        except OSError as exc:
            busy = isinstance(exc, _Closed) or exc.errno in _BUSY
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(BUSY_PAUSE_S)


def _attach(path: str, rank: str, adopt: dict[str, Any] | None, fds: list[int]) -> Attachment:
    hello = {"pid": os.getpid(), "process": _process, "rank": rank, "adopt": adopt}
    sock = dial(path)
    try:
        pidfd = os.pidfd_open(os.getpid())
        try:
            first, *rest = ipc.pack_json(ipc.Type.HELLO, hello)
            socket.send_fds(sock, [first], [pidfd, *fds])
        finally:
            os.close(pidfd)
        for packet in rest:
            sock.send(packet)
        data, received = ipc.recv_with_fds(sock)
        if not data:
            raise _Closed("the sidecar closed the connection")
        answer = ipc.unpack(data)
        message = ipc.parse_json(answer.payload)
        if answer.type != ipc.Type.WELCOME:
            raise ServiceUnavailable(f"the sidecar at {path} refused this process: {message.get('error')}")
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return sock, message, received


class SidecarEnds:
    """A count of how often the sidecar or its receiver exited. Exits recur if this process's own messages crash it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ends = deque[float](maxlen=MAX_ENDS)
        """Times of the exits since the last batch was taken."""
        self._taken = 0

    def add(self, taken: int) -> None:
        """Counts an exit after `taken` batches. Raises ServiceUnavailable after too many exits without a batch in
        between."""
        now = time.monotonic()
        if taken != self._taken:
            self._taken = taken
            self._ends.clear()
        self._ends.append(now)
        if len(self._ends) == MAX_ENDS and now - self._ends[0] < ENDS_WITHIN_S:
            raise ServiceUnavailable(
                f"the sidecar at {self._path} ended {MAX_ENDS} times within {ENDS_WITHIN_S:.0f} s without "
                "sending a batch: see the last lines that it printed"
            )


class Absence:
    """A sidecar that is unreachable while its container starts or restarts.

    A caller whose attempt failed calls `wait()` and tries again, until `wait()` raises.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._since = time.monotonic()
        self._noted = False

    def wait(self, exc: Exception) -> None:
        """Waits briefly. Raises ServiceUnavailable, with `exc` as the reason, once further waiting is useless."""
        waited = time.monotonic() - self._since
        if (why := failure(self._path)) is not None:
            raise ServiceUnavailable(f"the service at {self._path} failed: {why}") from exc
        if waited > ABSENCE_DEADLINE_S:
            raise ServiceUnavailable(
                f"no sidecar appeared at {self._path} within {waited:.0f} s (is its container running?): {exc}"
            ) from exc
        if waited > ABSENCE_NOTE_S and not self._noted:
            self._noted = True
            say(f"no sidecar responds at {self._path}; waiting for it ({exc})")
        time.sleep(ABSENCE_PAUSE_S)


def failure(path: str) -> str | None:
    """Returns the message that a service on this machine wrote next to its socket when it gave up. Returns a note if
    the folder is gone, and None otherwise."""
    try:
        return Path(path).with_name("failed").read_text().strip()
    except OSError:
        return None if os.path.isdir(os.path.dirname(path)) else "it was killed, and its folder is gone"


class _Lasting(socket.socket):
    """A socket without a ResourceWarning: its owner closes it, or the kernel does when the process exits."""

    def __del__(self) -> None: ...


def dial(path: str) -> socket.socket:
    """Connects to a sidecar's socket. Adds a remedy to the message of an OSError.

    Unless the environment names the socket, it must belong to this user. Nothing is sent to another user's socket.
    """
    if len(path.encode()) > ipc.MAX_PATH_NBYTES:
        raise ServiceUnavailable(
            f"a Unix socket's path may have at most {ipc.MAX_PATH_NBYTES} bytes, but {path!r} has "
            f"{len(path.encode())}: choose a folder with a shorter path (TMPDIR, or DATALOADERJOB_DIR)"
        )
    sock = _Lasting(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    sock.settimeout(DIAL_TIMEOUT_S)
    try:
        sock.connect(path)
        if not os.environ.get(SOCKET_VARIABLE) and (uid := sockets.peer_uid(sock)) != os.getuid():
            raise ServiceUnavailable(
                f"the sidecar at {path} must belong to user {os.getuid()}, but belongs to user {uid}: set "
                "DATALOADERJOB_DIR to a folder of your own that others cannot write to"
            )
    except BaseException as exc:
        sock.close()
        if isinstance(exc, PermissionError):
            raise ServiceUnavailable(
                f"user {os.getuid()} may not connect to the sidecar's socket {path}: run the trainer as the sidecar's "
                "user or in its group (on a cluster: the same securityContext.fsGroup)"
            ) from exc
        if isinstance(exc, ConnectionRefusedError) and not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ServiceUnavailable(
                f"{path} is not a sidecar's socket: is {SOCKET_VARIABLE} correct?"
            ) from exc
        raise
    return sock


def _another_process() -> None:
    global _process
    _process = os.urandom(8).hex()


os.register_at_fork(after_in_child=_another_process)
