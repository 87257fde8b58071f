"""Ports for servers of tests, which may begin to listen seconds later, and again after they were killed."""

from __future__ import annotations

import socket

from dataloaderjob.local.ports import RAYS_AGENT

_reserved: list[int] = []
"""Descriptors: sockets could not travel with this module, which datasets of tests may use."""


def reserve_port() -> int:
    """Until this process ends, on all addresses, the system gives it to nobody who asks for any port.

    Servers can listen there: they set SO_REUSEADDR. `local.ports.ReservedPort` reserves one of 127.0.0.1 only, and
    the pods of tests have addresses of their own.
    """
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("0.0.0.0", 0))
    port = int(sock.getsockname()[1])
    _reserved.append(sock.detach())
    return port if port != RAYS_AGENT else reserve_port()
