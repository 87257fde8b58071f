"""Ports of this machine that stay free until who they are for listens there."""

from __future__ import annotations

import socket

RAYS_AGENT = 52365
"""Each Ray's agent for the dashboard listens there, if nobody does yet."""


class ReservedPort:
    """A port of 127.0.0.1 that the system gives to nobody else until `close`.

    Whoever knows it can listen there meanwhile, again and again, if SO_REUSEADDR is set, as servers do.
    """

    def __init__(self) -> None:
        self._socket = _bound()
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close()


def _bound() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    if sock.getsockname()[1] != RAYS_AGENT:
        return sock
    with sock:  # held meanwhile, so that it is not given once more
        return _bound()
