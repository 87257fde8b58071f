"""A receiver's link to a feeder, over a real socket: wherever it breaks, the next link begins anew."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from feeder_link import BODY, JOB, KEY, WAIT_S, Feeder, Sink, frame, step, up
from generations import Generations
from hypothesis import given, settings
from hypothesis import strategies as st
from sealing import sealed_all

from dataloaderjob.core import digests, frames
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import HEADER_NBYTES, Flag, FrameKind
from dataloaderjob.core.seals import MAC_NBYTES, SEAL_NBYTES
from dataloaderjob.core.tls import TlsConnection
from dataloaderjob.sidecar.feeder_connection import BODY_WAIT_S, WAITALL_ABOVE_NBYTES, FeederConnection

NOTE = b"loading"
RESET = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def feeder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Feeder]:
    certificates = Generations(tmp_path_factory.mktemp("tls")) if request.param else None
    made = Feeder(certificates=certificates)
    yield made
    made.close()


def breaks(connection: FeederConnection) -> None:
    """Until the connection sees that its link is gone; then as the receiver does it."""
    with pytest.raises(ConnectionError):
        while True:
            step(connection)
    connection.give_up(time.monotonic())


def cut_and_come_back(feeder: Feeder, sink: Sink, cut: int, *, reset: bool = False) -> None:
    """A link on which the stream comes up to `cut` and no more, and another with whole frames of both kinds."""
    connection = FeederConnection(feeder.endpoint, sink, key=KEY, job=JOB, name="r", tls=feeder.tls)
    first = feeder.link(connection)
    first.sendall(sealed_all(first.seals, STREAM)[:cut])
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
        kind = FrameKind.BODY if payload in BODY and payload else FrameKind.NOTE
        second.sendall(sealed_all(second.seals, frame(kind, payload, ticket)))
        while len(sink.came) <= ticket - 7:
            step(connection)
    assert sink.came == whole
    connection.close()


STREAM = frame(FrameKind.NOTE, NOTE, 1) + frame(FrameKind.BODY, BODY, 2) + frame(FrameKind.FAILED, BODY, 3)
HEAD_NBYTES = HEADER_NBYTES + SEAL_NBYTES
TO_BODY = 2 * HEAD_NBYTES + len(NOTE) + MAC_NBYTES
STREAM_NBYTES = 3 * HEAD_NBYTES + len(NOTE) + 2 * len(BODY) + 2 * MAC_NBYTES


@pytest.mark.parametrize("takes", [True, False], ids=["body-has-a-place", "body-is-thrown-away"])
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(TO_BODY + len(BODY) // 2, id="within-a-body"),
        pytest.param(TO_BODY + len(BODY) - 1, id="before-its-last-byte"),
        pytest.param(TO_BODY + len(BODY) - WAITALL_ABOVE_NBYTES, id="where-little-is-left"),
        pytest.param(STREAM_NBYTES - 1, id="within-a-control-frame"),
        pytest.param(HEADER_NBYTES // 2, id="within-a-header"),
        pytest.param(TO_BODY, id="before-a-body"),
        pytest.param(0, id="before-anything"),
    ],
)
def test_link_that_breaks_and_recovers_swallows_nothing(feeder: Feeder, cut: int, takes: bool) -> None:
    cut_and_come_back(feeder, Sink(takes=takes), cut)


@given(cut=st.integers(0, STREAM_NBYTES - 1), takes=st.booleans(), reset=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_link_may_break_anywhere(feeder: Feeder, cut: int, takes: bool, reset: bool) -> None:
    cut_and_come_back(feeder, Sink(takes=takes), cut, reset=reset)


@pytest.mark.parametrize(
    "bit", [None, 3, 70, 8 * len(BODY) - 1], ids=["intact", "digest", "identity", "last-bit"]
)
def test_damaged_body_ends_the_link_if_it_is_checked(feeder: Feeder, bit: int | None) -> None:
    body = bytearray(BODY)
    digests.seal(memoryview(body), 7)
    if bit is not None:
        body[bit // 8] ^= 1 << bit % 8
    sink = Sink()
    connection = FeederConnection(feeder.endpoint, sink, key=KEY, job=JOB, name="r", tls=feeder.tls)
    link = feeder.link(connection)
    for flags in (0, Flag.CHECKSUM):
        header = frames.pack_header(FrameKind.BODY, ticket=flags, nbytes=len(body), flags=flags)
        link.sendall(sealed_all(link.seals, header + body))
    damaged = "batch 1 from feeder-0 arrived damaged"
    with contextlib.nullcontext() if bit is None else pytest.raises(RemoteProtocolError, match=damaged):
        while len(sink.came) < 2:
            step(connection)
    assert sink.came[0] == (0, bytes(body)), "unchecked"
    assert len(sink.came) == (2 if bit is None else 1)
    connection.close()


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


def test_bodies_of_a_slow_feeder_are_not_waited_for(feeder: Feeder) -> None:
    sink = Sink()
    connection, sock = up(feeder, sink)
    recording = Recording(connection.sock)  # type: ignore[arg-type]
    connection.sock = recording  # type: ignore[assignment]

    def body(ticket: int, *, late: bool) -> bool:
        """Whether it was waited for."""
        recording.waited.clear()
        data = sealed_all(sock.seals, frame(FrameKind.BODY, BODY, ticket))
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


def test_early_bytes_of_a_slow_feeders_body_do_not_make_it_fast(feeder: Feeder) -> None:
    sink = Sink()
    connection, sock = up(feeder, sink)
    recording = Recording(connection.sock)  # type: ignore[arg-type]
    connection.sock = recording  # type: ignore[assignment]

    def body(ticket: int) -> bool:
        """Whether it was waited for. Most of it came while the receiver was busy, the rest comes while it waits."""
        recording.waited.clear()
        data = sealed_all(sock.seals, frame(FrameKind.BODY, BODY, ticket))
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


def test_body_already_received_is_taken_with_its_header(feeder: Feeder) -> None:
    sink = Sink()
    connection, sock = up(feeder, sink)
    sock.sendall(sealed_all(sock.seals, frame(FrameKind.BODY, BODY, 0)))
    time.sleep(0.05)
    step(connection)
    assert [ticket for ticket, _ in sink.came] == [0]
    connection.close()


@pytest.mark.parametrize("missing", [1, 5_000, 16_000, 40_000])
def test_rest_of_a_record_wakes_the_receiver(tmp_path: Path, missing: int) -> None:
    feeder, sink = Feeder(certificates=Generations(tmp_path)), Sink()
    connection, sock = up(feeder, sink)
    assert isinstance(sock, TlsConnection)
    sock._encrypt([sealed_all(sock.seals, frame(FrameKind.BODY, BODY, 0))])
    sent = sock._unsent
    socket.socket.sendall(sock, sent[:-missing])
    step(connection)
    assert not sink.came
    socket.socket.sendall(sock, sent[-missing:])
    while not sink.came:
        step(connection)
    assert sink.came == [(0, BODY)]
    connection.close()
    feeder.close()
