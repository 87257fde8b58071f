"""/metrics, /healthz and /status over HTTP/1.0, in the parent, one short answer a connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

MAX_REQUEST_NBYTES = 8192
Handler = Callable[[str], tuple[int, str, str]]
"""Path to (status, content type, body)."""

REASONS = {200: "OK", 404: "Not Found", 400: "Bad Request", 503: "Service Unavailable"}


class HttpServer:
    """Accepts, reads one request head, answers, closes. Non-blocking; driven by the parent's loop."""

    def __init__(self, host: str, port: int, handler: Handler) -> None:
        self.sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.sock.setblocking(False)
        self.port: int = self.sock.getsockname()[1]
        self._handler = handler

    def on_ready(self) -> None:
        """Serves one client; one that is slow to ask or to read is dropped after 100 ms."""
        try:
            client, _ = self.sock.accept()
        except OSError:
            return
        with client, contextlib.suppress(OSError):
            client.settimeout(0.1)
            head = b""
            while b"\r\n\r\n" not in head and len(head) < MAX_REQUEST_NBYTES:
                data = client.recv(MAX_REQUEST_NBYTES)
                if not data:
                    return
                head += data
            words = head.split(b"\r\n", 1)[0].split()
            if len(words) != 3 or words[0] != b"GET":
                status, kind, body = 400, "text/plain", "only GET is served here\n"
            else:
                status, kind, body = self._handler(words[1].decode("ascii", "replace"))
            data = body.encode()
            client.sendall(
                f"HTTP/1.0 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
            )
