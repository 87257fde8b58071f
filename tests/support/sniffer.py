"""A relay of TCP connections that keeps what it sees."""

from __future__ import annotations

import contextlib
import functools
import socket

from middleman import Carry, Middleman


class Sniffer(Middleman):
    """Connects those who connect to it with `target`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.connections = 0
        self.seen = bytearray()
        """All bytes of all connections, of both sides."""
        super().__init__(target)

    def carriers(self, near: socket.socket, far: socket.socket) -> list[Carry]:
        self.connections += 1
        return [functools.partial(self._carry, *ends) for ends in ((near, far), (far, near))]

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                self.seen += data
                target.sendall(data)
        self.end(source, target)
