"""A supervisor reduced to what sidecars see of it: a list of feeders that tests change at will."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from welcomes import welcome

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import ProtocolError


class Lister:
    """Listens on a port of its own. `told` holds what sidecars said, metrics left out."""

    def __init__(self, key: bytes, job: str, port: int = 0) -> None:
        self.told: list[dict[str, Any]] = []
        self._key, self._job = key, job
        self._lock = threading.Lock()
        self._links: list[socket.socket] = []
        self._message: dict[str, Any] = {"type": "feeders", "feeders": [], "desired": 0, "notes": []}
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def list(
        self, endpoints: list[tuple[str, str, str, int]], *, desired: int, notes: tuple[str, ...] = ()
    ) -> None:
        """Publishes (name, instance, host, port) of each feeder."""
        feeders = [{"name": n, "instance": i, "host": h, "port": p} for n, i, h, p in endpoints]
        with self._lock:
            self._message = {"type": "feeders", "feeders": feeders, "desired": desired, "notes": list(notes)}
            for link in self._links:
                with contextlib.suppress(OSError):
                    sockets.send_message(link, self._message)

    def close(self) -> None:
        """As if it were killed: nothing listens any more, and all links end."""
        with self._lock:
            for sock in (self._listener, *self._links):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait on it
                sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link = sockets.Connection.of(self._listener.accept()[0])
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: sockets.Connection) -> None:
        with contextlib.suppress(OSError, ProtocolError):
            welcome(link, self._key, job=self._job)
            with self._lock:
                sockets.send_message(link, self._message)
                self._links.append(link)
            while True:
                message = sockets.recv_message(link)
                if message["type"] != "metrics":
                    self.told.append(message)
