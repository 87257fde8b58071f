"""Who connects to a job's sockets, and does not mean well."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dataloaderjob.core import handshake, ipc, sockets


def visit(path: str, packets: Iterable[bytes] = (), fds: Sequence[int] = ()) -> socket.socket:
    """A connection to a sidecar's socket on which this was said; the descriptors go with the first packet."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    sock.settimeout(10)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for at, packet in enumerate(packets):
            socket.send_fds(sock, [packet], [] if at else fds)
    return sock


def answer(sock: socket.socket) -> ipc.Packet | None:
    """What a sidecar says to it; None where it ends the connection without a word."""
    try:
        data, fds = ipc.recv_with_fds(sock)
    except ConnectionResetError:
        return None
    for fd in fds:
        os.close(fd)
    return ipc.unpack(data) if data else None


def refusal(sock: socket.socket) -> str:
    """Why a sidecar refuses it."""
    with sock:
        packet = answer(sock)
    assert packet is not None, "it was closed without a word"
    assert packet.type == ipc.Type.REFUSED, packet
    return str(ipc.parse_json(packet.payload)["error"])


def hello(**fields: Any) -> list[bytes]:
    told = {"rank": "stranger", "pid": os.getpid(), "process": "stranger", "adopt": None, **fields}
    return ipc.pack(ipc.Type.HELLO, json.dumps(told).encode())


def call(port: int) -> sockets.Connection:
    """A connection to a feeder or a supervisor, before any handshake."""
    return sockets.dial(("127.0.0.1", port), 10)


def heard(sock: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def messages(data: bytes) -> list[dict[str, Any]]:
    """Those of `core.sockets` in what was heard."""
    left, found = bytearray(data), []
    while (message := sockets.take_message(left, handshake.MAX_HELLO_NBYTES)) is not None:
        found.append(message)
    return found


def all_end(held: Mapping[socket.socket, bytes], within_s: float) -> None:
    """Sends the bytes that belong to each of these twice a second, until the other side has ended them all."""
    select = selectors.DefaultSelector()
    for sock in held:
        sock.setblocking(False)
        select.register(sock, selectors.EVENT_READ)
    deadline, again_at = time.monotonic() + within_s, 0.0
    while open_ := [key.fileobj for key in select.get_map().values()]:
        now = time.monotonic()
        assert now < deadline, f"{len(open_)} of {len(held)} are open after {within_s} s"
        if now >= again_at:
            again_at = now + 0.5
            for sock, drip in held.items():
                if drip and sock in open_:
                    with contextlib.suppress(OSError):
                        sock.send(drip)
        for key, _ in select.select(0.1):
            if not _more(key.fileobj):
                select.unregister(key.fileobj)
    select.close()


def _more(sock: Any) -> bool:
    try:
        return bool(sock.recv(1 << 16))
    except BlockingIOError:
        return True
    except OSError:
        return False
