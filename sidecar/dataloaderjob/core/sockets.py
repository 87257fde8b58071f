"""Messages in JSON on a blocking socket, and the handshake that comes first. For connections outside the data path.

An `Acceptor` lets in those that hold the job's key. Each handshake has a short-lived thread. A peer without the key
costs at most 4 KiB and five seconds, however slowly it sends; beyond MAX_GUESTS at once, new ones are turned away.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from dataloaderjob.core import auth
from dataloaderjob.core.errors import AuthError, RemoteProtocolError

MAX_MESSAGE_NBYTES = 16 * 1024 * 1024
MAX_GUESTS = 64
Welcomed = Callable[[socket.socket, dict[str, Any]], None]


def peer_uid(sock: socket.socket) -> int:
    """The user of the process that holds the other end of a connected Unix socket, as the kernel knows it."""
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def recv_exactly(sock: socket.socket, n: int) -> bytes:
    """Raises ConnectionError when the peer ends before `n` bytes came."""
    data = bytearray(n)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the peer closed the connection")
        view = view[got:]
    return bytes(data)


def send_message(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(auth.pack_message(message))


def recv_message(sock: socket.socket) -> dict[str, Any]:
    (n,) = auth.LENGTH.unpack(recv_exactly(sock, auth.LENGTH.size))
    if n > MAX_MESSAGE_NBYTES:
        raise RemoteProtocolError(f"a message of {n} bytes exceeds {MAX_MESSAGE_NBYTES}")
    return auth.parse_message(recv_exactly(sock, n))


def greet(
    sock: socket.socket,
    key: bytes,
    *,
    role: str,
    name: str,
    job: str,
    facts: dict[str, Any] | None = None,
    timeout_s: float = auth.HANDSHAKE_TIMEOUT_S,
) -> dict[str, Any]:
    """The connecting side of the handshake. Returns the peer's facts; leaves no timeout on the socket."""
    sock.settimeout(timeout_s)
    handshake = auth.ClientHandshake(key, role=role, name=name, job=job, facts=facts)
    while handshake.facts is None:
        sock.sendall(handshake.receive(recv_exactly(sock, handshake.wanted)))
    sock.settimeout(None)
    return handshake.facts


def welcome(
    sock: socket.socket, key: bytes, *, job: str, facts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The accepting side. Returns the peer's answer (role, name, facts); refusals are told to the peer."""
    sock.settimeout(auth.HANDSHAKE_TIMEOUT_S)
    handshake = auth.ServerHandshake(key, job=job, facts=facts)
    sock.sendall(handshake.greeting)
    while handshake.peer is None:
        data = recv_exactly(sock, handshake.wanted)
        try:
            sock.sendall(handshake.receive(data))
        except AuthError as exc:
            with contextlib.suppress(OSError):
                send_message(sock, {"error": str(exc)})
            raise
    sock.settimeout(None)
    return handshake.peer


def tune(sock: socket.socket) -> None:
    """Options of a bulk link: no delay, dead peers found in 15 s, cubic where the kernel has it.

    Source of cubic: BBR took 0.25 to 0.27 CPU-s/GB where cubic took 0.20 to 0.25 (docs/benchmarks.md).
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 15000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


class Acceptor:
    """A listening socket and the handshakes under way."""

    def __init__(
        self, host: str, port: int, *, key: bytes, job: str, facts: dict[str, Any], welcomed: Welcomed
    ) -> None:
        """`welcomed(socket, answer)` is called in the handshake's thread and owns the socket from then on.

        Raises OSError when the address cannot be bound.
        """
        self._key, self._job, self._facts, self._welcomed = key, job, facts, welcomed
        self._lock = threading.Lock()
        self._guests: dict[socket.socket, float] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.create_server((host, port), family=family, backlog=128)
        self.sock.setblocking(False)

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    def accept_all(self) -> None:
        """Takes what waits at the listening socket. Never blocks, never raises for a guest's sake."""
        while True:
            try:
                guest, _ = self.sock.accept()
            except OSError:  # nothing more, or no descriptors left: the next tick tries again
                return
            with self._lock:
                full = len(self._guests) >= MAX_GUESTS
                if not full:
                    self._guests[guest] = time.monotonic() + auth.HANDSHAKE_TIMEOUT_S
            if full:
                guest.close()
                continue
            threading.Thread(target=self._greet, args=(guest,), name="dlj-handshake", daemon=True).start()

    def expire(self) -> None:
        """Ends handshakes past their deadline. Call about once a second."""
        now = time.monotonic()
        with self._lock:
            late = [guest for guest, deadline in self._guests.items() if deadline < now]
        for guest in late:
            with contextlib.suppress(OSError):
                guest.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()

    def _greet(self, guest: socket.socket) -> None:
        import logging  # a sidecar and a private service start without it

        log = logging.getLogger(__name__)
        try:
            tune(guest)
            answer = welcome(guest, self._key, job=self._job, facts=self._facts)
        except ConnectionError as exc:  # a probe of the port, for one, which comes every few seconds
            log.debug("a connection ended within its handshake: %s", exc)
            guest.close()
            return
        except Exception as exc:  # whatever a stranger's bytes provoke ends the stranger only
            log.info("a connection was refused: %s", exc)
            guest.close()
            return
        finally:
            self._forget(guest)
        self._welcomed(guest, answer)

    def _forget(self, guest: socket.socket) -> None:
        with self._lock:
            self._guests.pop(guest, None)
