"""A listener that stands between those who connect to it and the address that they mean."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable

Carry = Callable[[], None]
"""Carries the bytes of one direction of a connection until they end."""


class Middleman:
    """Connects those who connect to it with `target`. A subclass says how bytes are carried."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def carriers(self, near: socket.socket, far: socket.socket) -> Iterable[Carry]:
        """One for each direction of a new connection; each runs in a thread of its own."""
        raise NotImplementedError

    def cut(self) -> None:
        """Ends all connections; new ones may follow."""
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def end(self, source: socket.socket, target: socket.socket) -> None:
        """Ends a connection, one of whose directions has ended."""
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._open |= {near, far}
                for carry in self.carriers(near, far):
                    threading.Thread(target=carry, daemon=True).start()
