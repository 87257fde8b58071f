"""Ports of this machine, reserved until their intended user listens on them."""

from __future__ import annotations

import socket

RAYS_AGENT = 52365
"""Port on which the dashboard agent of each Ray node listens, unless another process already listens on it."""


class ReservedPort:
    """A port of 127.0.0.1 that the system assigns to no other process until `close`.

    Until then, a process that knows the number can listen on the port if it sets SO_REUSEADDR, as servers usually do.
    """

    def __init__(self) -> None:
        self._socket = _bound()
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Releases the port. Safe to call twice."""
        self._socket.close()


def _bound() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    if sock.getsockname()[1] != RAYS_AGENT:
        return sock
    with sock:  # kept open meanwhile, so that the same port is not assigned again
        return _bound()
