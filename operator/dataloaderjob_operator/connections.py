"""The connections to the operator's port for probes and metrics. Their number is limited, and each connection has a few
seconds for one request. aiohttp alone would keep a connection open even if its request never completes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from dataloaderjob.core.crowds import Crowds
from dataloaderjob.core.sockets import EVERYWHERE, listen

TIMEOUT_S = 5.0
"""Seconds that a request and its response may take. Kubernetes' probes time out after one second by default. Formatting
the metrics takes 10 ms."""
MAX_CONNECTIONS = 512
"""Maximum number of open connections. Beyond this number, the oldest connection from the address with the most
connections is closed."""
BACKLOG = 1024
SWEEP_S = 0.5
ACCEPT_PAUSE_S = 0.1
"""Seconds to pause after a failure to accept a connection, for example because no file descriptor is free."""


@dataclass(slots=True, eq=False)
class _Connection:
    transport: asyncio.Transport
    address: str
    deadline: float


@dataclass(slots=True)
class Connections:
    """The open connections."""

    _open: Crowds[_Connection] = field(default_factory=Crowds)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, transport: asyncio.Transport, address: str, now: float) -> None:
        """Adds a connection. Closes others if there are too many."""
        if len(self) >= MAX_CONNECTIONS:
            self.sweep(now)
        if len(self) >= MAX_CONNECTIONS:
            self._end(self._open.first_to_go())
        self._open.add(address, _Connection(transport, address, now + TIMEOUT_S))

    def sweep(self, now: float) -> None:
        """Forgets connections that have ended, and closes those that have exceeded TIMEOUT_S."""
        for connection in list(self._open):
            if connection.transport.is_closing() or connection.deadline <= now:
                self._end(connection)

    def close(self) -> None:
        for connection in list(self._open):
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        connection.transport.abort()
        self._open.remove(connection.address, connection)


@contextlib.asynccontextmanager
async def served(port: int, protocol: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    """Serves `protocol` on a port of every address. Yields the port number. Raises OSError."""
    sock = listen(EVERYWHERE, port, backlog=BACKLOG)
    sock.setblocking(False)
    made = Connections()
    tasks = [asyncio.create_task(_accept(sock, protocol, made)), asyncio.create_task(_sweep(made))]
    try:
        yield int(sock.getsockname()[1])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        made.close()
        sock.close()


async def _accept(sock: socket.socket, protocol: Callable[[], asyncio.Protocol], made: Connections) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            peer, found = await loop.sock_accept(sock)
        except OSError:
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        try:
            transport, _ = await loop.connect_accepted_socket(protocol, peer)
        except OSError:
            peer.close()
            continue
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  a socket's
        made.add(transport, str(found[0]), loop.time())


async def _sweep(made: Connections) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        made.sweep(asyncio.get_running_loop().time())
