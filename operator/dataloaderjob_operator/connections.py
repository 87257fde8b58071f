"""The connections to a port of the operator or the injector. Their number is limited, and each connection has a few
seconds for one request. aiohttp alone would keep a connection open even if its request never completes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from dataloaderjob.core.crowds import Crowds
from dataloaderjob.core.sockets import EVERYWHERE, listen

TIMEOUT_S = 5.0
"""Seconds that a request and its response may take, including the TLS handshake. Kubernetes' probes time out after one
second by default. Formatting the metrics takes 10 ms."""
SHUTDOWN_S = 1.0
"""Seconds for which a closing TLS connection waits for its peer."""
MAX_CONNECTIONS = 512
"""Maximum number of open connections. Beyond this number, the oldest connection from the address with the most
connections is closed."""
BACKLOG = 1024
SWEEP_S = 0.5
ACCEPT_PAUSE_S = 0.1
"""Seconds to pause after a failure to accept a connection, for example because no file descriptor is free."""
Peer = tuple[str, int]
"""The address and the port of a peer."""
Factory = Callable[[], asyncio.Protocol]


def peer_of(address: Any) -> Peer:
    """Returns the peer in an address of a socket."""
    return str(address[0]), int(address[1])


@dataclass(slots=True, eq=False)
class _Connection:
    sock: socket.socket
    address: str
    port: int
    deadline: float
    transport: asyncio.Transport | None = None
    """None during a TLS handshake."""
    handshake: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        """True once asyncio has closed the socket. A TLS transport that is closing may still exist for a while."""
        return self.sock.fileno() == -1

    def abort(self) -> None:
        if self.transport is None:
            if self.handshake is not None:
                self.handshake.cancel()
        elif not self.transport.is_closing():
            self.transport.abort()
        else:  # abort() fails once a TLS transport has ended
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class Connections:
    """The open connections. If there are too many, those on which no request has succeeded are closed first, and those
    with a request in progress last."""

    most: int
    _new: Crowds[_Connection] = field(default_factory=Crowds)
    _proven: Crowds[_Connection] = field(default_factory=Crowds)
    _busy: Crowds[_Connection] = field(default_factory=Crowds)

    @property
    def _crowds(self) -> tuple[Crowds[_Connection], ...]:
        """All crowds. Connections of the first are closed first."""
        return self._new, self._proven, self._busy

    def __len__(self) -> int:
        return sum(map(len, self._crowds))

    def add(
        self, sock: socket.socket, peer: Peer, now: float, transport: asyncio.Transport | None = None
    ) -> _Connection:
        """Adds a connection. Closes others if there are too many."""
        if len(self) >= self.most:
            self.sweep(now)
        if len(self) >= self.most:
            crowd = next(crowd for crowd in self._crowds if len(crowd))
            self._end(crowd, crowd.first_to_go())
        made = _Connection(sock, *peer, now + TIMEOUT_S, transport=transport)
        self._new.add(made.address, made)
        return made

    def began(self, peer: Peer, deadline: float) -> None:
        """Records that a request has begun, and sets its deadline."""
        self._move(peer, self._busy, deadline)

    def answered(self, peer: Peer, deadline: float, *, is_success: bool) -> None:
        """Records that a request was answered, and sets the deadline of the next one."""
        self._move(peer, self._proven if is_success else self._new, deadline)

    def sweep(self, now: float) -> None:
        """Forgets connections that have ended, and closes those that have exceeded their deadline."""
        for crowd in self._crowds:
            for connection in list(crowd):
                if connection.has_ended or connection.deadline <= now:
                    self._end(crowd, connection)

    def close(self) -> None:
        for crowd in self._crowds:
            for connection in list(crowd):
                self._end(crowd, connection)

    def _move(self, peer: Peer, to: Crowds[_Connection], deadline: float) -> None:
        for crowd in self._crowds:
            for connection in crowd.of(peer[0]):
                if connection.port == peer[1]:
                    crowd.remove(peer[0], connection)
                    connection.deadline = deadline
                    to.add(peer[0], connection)
                    return

    def _end(self, crowd: Crowds[_Connection], connection: _Connection) -> None:
        connection.abort()
        crowd.remove(connection.address, connection)


@contextlib.asynccontextmanager
async def served(
    port: int,
    protocol: Factory,
    *,
    tls: ssl.SSLContext | None = None,
    connections: Connections | None = None,
    drain: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[int]:
    """Serves `protocol` on a port of every address. Yields the port number. At the end, it accepts no more connections,
    then awaits `drain`, and then closes all connections. Raises OSError."""
    sock = listen(EVERYWHERE, port, backlog=BACKLOG)
    sock.setblocking(False)
    made = Connections(MAX_CONNECTIONS) if connections is None else connections
    accepting = asyncio.create_task(_accept(sock, protocol, tls, made))
    sweeping = asyncio.create_task(_sweep(made))
    try:
        yield int(sock.getsockname()[1])
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        sock.close()
        if drain is not None:
            await drain()
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        made.close()


async def _accept(
    sock: socket.socket, protocol: Factory, tls: ssl.SSLContext | None, made: Connections
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            peer, found = await loop.sock_accept(sock)
        except OSError:
            await asyncio.sleep(ACCEPT_PAUSE_S)
            continue
        if tls is not None:
            connection = made.add(peer, peer_of(found), loop.time())
            connection.handshake = asyncio.create_task(_handshake(connection, protocol, tls))
            await asyncio.sleep(0)  # sock_accept does not yield while connections are waiting
            continue
        try:
            transport, _ = await loop.connect_accepted_socket(protocol, peer)
        except OSError:
            peer.close()
            continue
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  a socket's
        made.add(peer, peer_of(found), loop.time(), transport)


async def _handshake(connection: _Connection, protocol: Factory, tls: ssl.SSLContext) -> None:
    """Completes a connection's TLS handshake. Closes the socket if this fails or is cancelled."""
    try:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            protocol,
            connection.sock,
            ssl=tls,
            ssl_handshake_timeout=TIMEOUT_S,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
    except (OSError, asyncio.CancelledError):  # OSError includes SSLError
        connection.sock.close()
        return
    assert isinstance(transport, asyncio.Transport)  # noqa: S101  a socket's
    connection.transport = transport


async def _sweep(made: Connections) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        made.sweep(asyncio.get_running_loop().time())
