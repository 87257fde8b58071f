"""A feeder that only lets a receiver in and sends what it is told to, and the receiver's side of such a link."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from typing import Any

from generations import Generations

from dataloaderjob.core import frames, sockets
from dataloaderjob.core.frames import FrameKind, Header
from dataloaderjob.core.handshake import DATA, MAX_HELLO_NBYTES, ServerHandshake
from dataloaderjob.core.keys import Part
from dataloaderjob.core.tls import PREAMBLE
from dataloaderjob.sidecar.dispatch.streams import Endpoint
from dataloaderjob.sidecar.feeder_connection import BodyPhase, FeederConnection

KEY, JOB, INSTANCE = bytes(range(32)), "job", "i0"
WAIT_S = 5.0
BODY = bytes(range(256)) * 256


class Sink:
    """What came of whole frames. `takes`: whether a body has a place, or is to be thrown away."""

    def __init__(self, *, takes: bool = True) -> None:
        self.came: list[tuple[int, bytes]] = []
        self.takes, self.pool = takes, bytearray(len(BODY))

    def connection_up(self, connection: FeederConnection, facts: dict[str, Any]) -> None: ...
    def connection_moved(self, connection: FeederConnection) -> None: ...

    def connection_frame(self, connection: FeederConnection, header: Header, payload: bytes) -> None:
        self.came.append((header.ticket, payload))

    def connection_body(self, connection: FeederConnection, header: Header) -> memoryview | None:
        return memoryview(self.pool)[: header.nbytes] if self.takes else None

    def connection_body_done(self, connection: FeederConnection, header: Header, digest: int) -> None:
        self.came.append((header.ticket, bytes(self.pool[: header.nbytes])))


class Feeder:
    """A stand-in: it lets a receiver in, and sends what it is told to."""

    def __init__(
        self,
        instance: str = INSTANCE,
        *,
        shares_memory: bool = False,
        certificates: Generations | None = None,
    ) -> None:
        """`shares_memory`: it is to be reached by a Unix socket too. `certificates`: over TCP, links are under TLS."""
        self._own = None if certificates is None else certificates.of(Part.FEEDER)
        self.tls = None if certificates is None else certificates.of(Part.SIDECAR)
        """The certificates of receivers."""
        over_tcp = socket.create_server(("127.0.0.1", 0))
        self.listeners = [
            over_tcp,
            *([sockets.listen(sockets.on_machine(instance), 0)] if shares_memory else []),
        ]
        self.endpoint = Endpoint("feeder-0", instance, *over_tcp.getsockname())
        self.links: list[sockets.Connection] = []

    def close(self) -> None:
        for sock in [*self.links, *self.listeners]:
            sock.close()

    def link(self, connection: FeederConnection) -> sockets.Connection:
        """A new one, with both ends' greetings exchanged."""
        connection.connect(time.monotonic())
        (listener, *_), _, _ = select.select(self.listeners, [], [], WAIT_S)
        sock = sockets.Connection.of(listener.accept()[0])
        if self._own is not None:
            sock.sendall(PREAMBLE)
            sock.setblocking(False)
            sock = self._own.accepted(sock)
        self.links.append(sock)
        facts = {"instance": self.endpoint.instance}
        transport = sockets.transport_of(sock)
        handshake = ServerHandshake(KEY, job=JOB, facts=facts, versions=DATA, transport=transport)
        sock.setblocking(False)
        while True:
            try:
                sock.establish()
                break
            except BlockingIOError:
                step(connection)
        sock.sendall(handshake.greeting)
        while not handshake.done:
            step(connection)
            with contextlib.suppress(BlockingIOError):
                sock.sendall(handshake.receive(sock.recv(MAX_HELLO_NBYTES)))
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.seals = handshake.seals
        return sock


def step(connection: FeederConnection) -> None:
    """Waits until there is something for the connection, and hands it over."""
    assert connection.sock is not None
    poll = select.epoll()
    poll.register(connection.sock.fileno(), connection.interest)
    events = poll.poll(WAIT_S)
    poll.close()
    assert events, f"nothing came within {WAIT_S} s"
    connection.on_ready(events[0][1])


def frame(kind: FrameKind, payload: bytes, ticket: int) -> bytes:
    return frames.pack_header(kind, ticket=ticket, nbytes=len(payload)) + payload


def up(feeder: Feeder, sink: Sink) -> tuple[FeederConnection, sockets.Connection]:
    """A connection of which the next event is a frame, and the feeder's end of it."""
    connection = FeederConnection(feeder.endpoint, sink, key=KEY, job=JOB, name="r", tls=feeder.tls)
    sock = feeder.link(connection)
    while connection.phase is not BodyPhase.UP:
        step(connection)
    return connection, sock
