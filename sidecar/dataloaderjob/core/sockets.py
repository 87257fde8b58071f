"""Messages in JSON on a blocking socket, and the handshake that comes first. For connections outside the data path."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any

from dataloaderjob.core import auth
from dataloaderjob.core.errors import AuthError, RemoteProtocolError

MAX_MESSAGE_NBYTES = 16 * 1024 * 1024


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
            raise ConnectionError("the peer closed the link")
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
