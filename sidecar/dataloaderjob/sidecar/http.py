"""/metrics, /healthz and /status over HTTP/1.0, in the parent, one short answer a connection. Never blocks."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dataloaderjob.core.errors import InputError

MAX_REQUEST_NBYTES = 8192
MAX_CLIENTS = 64
CLIENT_TIMEOUT_S = 2.0
"""To ask, and again to read the answer."""
Handler = Callable[[str], tuple[int, str, str]]
"""Path to (status, content type, body)."""

REASONS = {200: "OK", 404: "Not Found", 400: "Bad Request", 503: "Service Unavailable"}


@dataclass(slots=True, eq=False)
class Client:
    """One connection: first its request comes in, then the answer goes out."""

    sock: socket.socket
    deadline: float
    head: bytearray = field(default_factory=bytearray)
    out: bytes = b""


class HttpServer:
    """Driven by the parent's loop: `expire` now and then, all else by the selector."""

    def __init__(self, host: str, port: int, handler: Handler, select: selectors.BaseSelector) -> None:
        """Raises InputError when it cannot listen there."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, port), family=family)
        except OSError as exc:
            raise InputError(
                f"metrics are to be served at {host}:{port}, which cannot be had ({exc.strerror}): choose another port"
            ) from exc
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._handler = handler
        self._select = select
        self._clients: set[Client] = set()
        select.register(self._sock, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return
        if len(self._clients) >= MAX_CLIENTS:
            sock.close()
            return
        sock.setblocking(False)
        client = Client(sock, time.monotonic() + CLIENT_TIMEOUT_S)
        self._clients.add(client)
        self._select.register(sock, selectors.EVENT_READ, lambda: self._on_ready(client))

    def _on_ready(self, client: Client) -> None:
        try:
            if not client.out:
                data = client.sock.recv(MAX_REQUEST_NBYTES)
                client.head += data
                if data and b"\r\n\r\n" not in client.head and len(client.head) < MAX_REQUEST_NBYTES:
                    return
                client.out = self._answer(bytes(client.head))
                client.deadline = time.monotonic() + CLIENT_TIMEOUT_S
                self._select.modify(client.sock, selectors.EVENT_WRITE, lambda: self._on_ready(client))
            client.out = client.out[client.sock.send(client.out) :]
        except BlockingIOError:
            return
        except OSError:
            client.out = b""
        if not client.out:
            self._drop(client)

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) != 3 or words[0] != b"GET":
            status, kind, body = 400, "text/plain", "only GET is served here\n"
        else:
            status, kind, body = self._handler(words[1].decode("ascii", "replace"))
        data = body.encode()
        return (
            f"HTTP/1.0 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        ).encode() + data

    def expire(self, now: float) -> None:
        """Drops clients that are slow to ask or to read."""
        for client in [c for c in self._clients if c.deadline < now]:
            self._drop(client)

    def _drop(self, client: Client) -> None:
        self._clients.discard(client)
        with contextlib.suppress(KeyError):
            self._select.unregister(client.sock)
        client.sock.close()

    def close_in_child(self) -> None:
        """After a fork: the child must not keep the port, nor scrapers waiting."""
        self._sock.close()
        for client in self._clients:
            client.sock.close()
