"""The connections to a port of the operator or the injector. Their number is limited, and each connection has a few
seconds for one request. aiohttp alone would keep a connection open even if its request never completes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from dataloaderjob.core.crowds import Crowds
from dataloaderjob.core.sockets import EVERYWHERE, listen

TIMEOUT_S = 5.0
"""Seconds that a request and its response may take, including the TLS handshake. Kubernetes' probes time out after one
second by default. Formatting the metrics takes 10 ms."""
MAX_CONNECTIONS = 512
"""Maximum number of open connections. Beyond this number, the oldest connection from the address with the most
connections is closed."""
BACKLOG = 1024
SWEEP_S = 0.5
ACCEPT_PAUSE_S = 0.1
"""Seconds to pause after a failure to accept a connection, for example because no file descriptor is free."""


Peer = tuple[str, int]
"""The address and the port of a peer."""


def peer_of(address: Any) -> Peer:
    """Returns the peer in an address of a socket."""
    return str(address[0]), int(address[1])


@dataclass(slots=True, eq=False)
class _Connection:
    address: str
    port: int
    deadline: float
    transport: asyncio.Transport | None = None
    """None during a TLS handshake."""
    handshake: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        if self.transport is None:
            return self.handshake is not None and self.handshake.done()
        return self.transport.is_closing()

    def abort(self) -> None:
        if self.transport is not None:
            # A TLS transport that is closing ends within its shutdown timeout. Once it has ended, abort() fails.
            if self.handshake is None or not self.transport.is_closing():
                self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()


@dataclass(slots=True)
class Connections:
    """The open connections."""

    _open: Crowds[_Connection] = field(default_factory=Crowds)

    def __len__(self) -> int:
        return len(self._open)

    def add(self, peer: Peer, now: float, transport: asyncio.Transport | None = None) -> _Connection:
        """Adds a connection. Closes others if there are too many."""
        if len(self) >= MAX_CONNECTIONS:
            self.sweep(now)
        if len(self) >= MAX_CONNECTIONS:
            self._end(self._open.first_to_go())
        made = _Connection(*peer, now + TIMEOUT_S, transport)
        self._open.add(made.address, made)
        return made

    def extend(self, peer: Peer, deadline: float) -> None:
        """Sets the deadline of a connection, for instance until its next request."""
        for connection in self._open.of(peer[0]):
            if connection.port == peer[1]:
                connection.deadline = deadline

    def sweep(self, now: float) -> None:
        """Forgets connections that have ended, and closes those that have exceeded their deadline."""
        for connection in list(self._open):
            if connection.has_ended or connection.deadline <= now:
                self._end(connection)

    def close(self) -> None:
        for connection in list(self._open):
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        connection.abort()
        self._open.remove(connection.address, connection)


@contextlib.asynccontextmanager
async def served(
    port: int,
    protocol: Callable[[], asyncio.Protocol],
    *,
    tls: ssl.SSLContext | None = None,
    connections: Connections | None = None,
) -> AsyncIterator[int]:
    """Serves `protocol` on a port of every address. Yields the port number. Raises OSError."""
    sock = listen(EVERYWHERE, port, backlog=BACKLOG)
    sock.setblocking(False)
    made = Connections() if connections is None else connections
    tasks = [asyncio.create_task(_accept(sock, protocol, tls, made)), asyncio.create_task(_sweep(made))]
    try:
        yield int(sock.getsockname()[1])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        made.close()
        sock.close()


async def _accept(
    sock: socket.socket,
    protocol: Callable[[], asyncio.Protocol],
    tls: ssl.SSLContext | None,
    made: Connections,
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            peer, found = await loop.sock_accept(sock)
        except OSError:
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        whose = peer_of(found)
        if tls is not None:
            connection = made.add(whose, loop.time())
            connection.handshake = asyncio.create_task(_handshake(connection, peer, protocol, tls))
            continue
        try:
            transport, _ = await loop.connect_accepted_socket(protocol, peer)
        except OSError:
            peer.close()
            continue
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  a socket's
        made.add(whose, loop.time(), transport)


async def _handshake(
    connection: _Connection,
    peer: socket.socket,
    protocol: Callable[[], asyncio.Protocol],
    tls: ssl.SSLContext,
) -> None:
    """Completes a connection's TLS handshake. If the handshake fails or is cancelled, asyncio closes the connection."""
    try:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            protocol, peer, ssl=tls, ssl_handshake_timeout=TIMEOUT_S, ssl_shutdown_timeout=TIMEOUT_S
        )
    except OSError:  # includes SSLError
        return
    assert isinstance(transport, asyncio.Transport)  # noqa: S101  a socket's
    connection.transport = transport


async def _sweep(made: Connections) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        made.sweep(asyncio.get_running_loop().time())
