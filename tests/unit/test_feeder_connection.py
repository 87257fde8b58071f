"""A receiver's link to a feeder, over a real socket: wherever it breaks, the next link begins anew."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaderjob.core import digests, frames, sockets
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import HEADER_NBYTES, Flag, Header, Kind
from dataloaderjob.sidecar.dispatch.streams import Endpoint
from dataloaderjob.sidecar.feeder_connection import BODY_WAIT_S, WAITALL_ABOVE_NBYTES, FeederConnection, Phase

KEY, JOB, INSTANCE = bytes(range(32)), "job", "i0"
WAIT_S = 5.0
BODY = bytes(range(256)) * 256
NOTE = b"loading"
RESET = struct.pack("ii", 1, 0)


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

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("feeder-0", INSTANCE, *self.listener.getsockname())
        self.links: list[socket.socket] = []

    def close(self) -> None:
        for sock in [*self.links, self.listener]:
            sock.close()

    def link(self, connection: FeederConnection) -> socket.socket:
        """A new one, with both ends' greetings exchanged."""
        connection.connect(time.monotonic())
        sock, _ = self.listener.accept()
        self.links.append(sock)
        handshake = sockets.ServerHandshake(KEY, job=JOB, facts={"instance": INSTANCE}, versions=sockets.DATA)
        sock.sendall(handshake.greeting)
        sock.setblocking(False)
        while not handshake.done:
            step(connection)
            with contextlib.suppress(BlockingIOError):
                sock.sendall(handshake.receive(sock.recv(sockets.MAX_HELLO_NBYTES)))
        sock.setblocking(True)
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


def frame(kind: Kind, payload: bytes, ticket: int) -> bytes:
    return frames.pack_header(kind, ticket=ticket, nbytes=len(payload)) + payload


@pytest.fixture(scope="module")
def feeder() -> Iterator[Feeder]:
    made = Feeder()
    yield made
    made.close()


def breaks(connection: FeederConnection) -> None:
    """Until the connection sees that its link is gone; then as the receiver does it."""
    with pytest.raises(ConnectionError):
        while True:
            step(connection)
    connection.give_up(time.monotonic())


def cut_and_come_back(feeder: Feeder, sink: Sink, start: bytes, *, reset: bool = False) -> None:
    """A link on which `start` comes and no more, and another with whole frames of both kinds."""
    connection = FeederConnection(feeder.endpoint, sink, key=KEY, job=JOB, name="r")
    first = feeder.link(connection)
    first.sendall(start)
    if reset:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    first.close()
    breaks(connection)
    sink.came.clear()
    sink.takes = True
    whole = [(7, NOTE), (8, BODY), (9, b""), (10, NOTE), (11, BODY[:100])]
    second = feeder.link(connection)
    step(connection)  # it is up, and nothing has come yet
    for ticket, payload in whole:
        second.sendall(frame(Kind.BODY if payload in BODY and payload else Kind.NOTE, payload, ticket))
        while len(sink.came) <= ticket - 7:
            step(connection)
    assert sink.came == whole
    connection.close()


STREAM = frame(Kind.NOTE, NOTE, 1) + frame(Kind.BODY, BODY, 2) + frame(Kind.FAILED, BODY, 3)
TO_BODY = 2 * HEADER_NBYTES + len(NOTE)


@pytest.mark.parametrize("takes", [True, False], ids=["body-has-a-place", "body-is-thrown-away"])
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(TO_BODY + len(BODY) // 2, id="within-a-body"),
        pytest.param(TO_BODY + len(BODY) - 1, id="before-its-last-byte"),
        pytest.param(TO_BODY + len(BODY) - WAITALL_ABOVE_NBYTES, id="where-little-is-left"),
        pytest.param(len(STREAM) - 1, id="within-a-control-frame"),
        pytest.param(HEADER_NBYTES // 2, id="within-a-header"),
        pytest.param(TO_BODY, id="before-a-body"),
        pytest.param(0, id="before-anything"),
    ],
)
def test_a_link_that_breaks_and_comes_back_swallows_nothing(feeder: Feeder, cut: int, takes: bool) -> None:
    cut_and_come_back(feeder, Sink(takes=takes), STREAM[:cut])


@given(cut=st.integers(0, len(STREAM) - 1), takes=st.booleans(), reset=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_link_may_break_anywhere(feeder: Feeder, cut: int, takes: bool, reset: bool) -> None:
    cut_and_come_back(feeder, Sink(takes=takes), STREAM[:cut], reset=reset)


@pytest.mark.parametrize(
    "bit", [None, 3, 70, 8 * len(BODY) - 1], ids=["intact", "digest", "identity", "last-bit"]
)
def test_a_body_that_came_damaged_ends_the_link_where_it_is_checked(feeder: Feeder, bit: int | None) -> None:
    body = bytearray(BODY)
    digests.seal(memoryview(body), 7)
    if bit is not None:
        body[bit // 8] ^= 1 << bit % 8
    sink = Sink()
    connection = FeederConnection(feeder.endpoint, sink, key=KEY, job=JOB, name="r")
    link = feeder.link(connection)
    for flags in (0, Flag.CHECKSUM):
        header = frames.pack_header(Kind.BODY, ticket=flags, nbytes=len(body), flags=flags)
        link.sendall(header + body)
    while not sink.came:
        step(connection)
    assert sink.came == [(0, bytes(body))], "unchecked"
    if bit is None:
        while len(sink.came) < 2:
            step(connection)
    else:
        with pytest.raises(RemoteProtocolError, match="batch 1 came damaged from feeder-0"):
            while len(sink.came) < 2:
                step(connection)
    connection.close()


def up(feeder: Feeder, sink: Sink) -> tuple[FeederConnection, socket.socket]:
    """A connection of which the next event is a frame, and the feeder's end of it."""
    connection = FeederConnection(feeder.endpoint, sink, key=KEY, job=JOB, name="r")
    sock = feeder.link(connection)
    while connection.phase is not Phase.UP:
        step(connection)
    return connection, sock


class Recording:
    """A socket that notes whether each body was waited for."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.waited: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv_into(self, target: Any, n: int, flags: int) -> int:
        self.waited.append(bool(flags & socket.MSG_WAITALL))
        return self._sock.recv_into(target, n, flags)


def test_bodies_of_a_feeder_that_is_slower_than_that_are_not_waited_for(feeder: Feeder) -> None:
    sink = Sink()
    connection, sock = up(feeder, sink)
    recording = Recording(connection.sock)  # type: ignore[arg-type]
    connection.sock = recording  # type: ignore[assignment]

    def body(ticket: int, *, late: bool) -> bool:
        """Whether it was waited for."""
        recording.waited.clear()
        data = frame(Kind.BODY, BODY, ticket)
        sock.sendall(data[: len(data) // 3] if late else data)
        begun = time.monotonic()
        step(connection)
        if late:
            assert len(sink.came) == ticket, "it is not whole"
            assert time.monotonic() - begun < WAIT_S
            sock.sendall(data[len(data) // 3 :])
        while len(sink.came) == ticket:
            step(connection)
        return any(recording.waited)

    waited = [body(ticket, late=ticket < 8) for ticket in range(20)]
    # One is late, and two are not waited for; the next is, and late again: four are not; then one is whole.
    assert waited == [True, False, False, True, *[False] * 4, *[True] * 12]
    connection.close()


def test_that_most_of_a_slow_feeders_body_is_there_already_does_not_make_it_quick(feeder: Feeder) -> None:
    sink = Sink()
    connection, sock = up(feeder, sink)
    recording = Recording(connection.sock)  # type: ignore[arg-type]
    connection.sock = recording  # type: ignore[assignment]

    def body(ticket: int) -> bool:
        """Whether it was waited for. Most of it came while the receiver was busy, the rest comes while it waits."""
        recording.waited.clear()
        data = frame(Kind.BODY, BODY, ticket)
        most = 3 * len(data) // 4
        sock.sendall(data[:most])
        rest = threading.Timer(BODY_WAIT_S / 4, sock.sendall, [data[most:]])
        rest.start()
        while len(sink.came) == ticket:
            step(connection)
        rest.join()
        return any(recording.waited)

    assert [body(ticket) for ticket in range(8)] == [True, False, False, True, *[False] * 4]
    connection.close()


def test_a_body_that_is_there_is_taken_in_the_turn_of_its_header(feeder: Feeder) -> None:
    sink = Sink()
    connection, sock = up(feeder, sink)
    sock.sendall(frame(Kind.BODY, BODY, 0))
    time.sleep(0.05)
    step(connection)
    assert [ticket for ticket, _ in sink.came] == [0]
    connection.close()
