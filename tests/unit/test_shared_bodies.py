"""Batches in the memory of a feeder on the same machine, over a real Unix socket and real shared memory."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import resource
import select
import socket
from collections.abc import Iterator

import pytest
from feeder_link import BODY, JOB, KEY, Feeder, Sink, frame, step, up
from sealing import sealed_all

from dataloaderjob.core import digests, frames, sockets
from dataloaderjob.core.control import seal
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import HEADER_NBYTES, Flag, FrameKind
from dataloaderjob.sidecar.feeder_connection import MAX_NOT_GREETED, BodyPhase, FeederConnection
from dataloaderjob.sidecar.shared_bodies import MOST_BUFFERS, connect

_instances = (f"shares-{os.getpid()}-{n}" for n in itertools.count())
TAKEN = frames.pack_header(FrameKind.TAKEN)


@pytest.fixture
def feeder() -> Iterator[Feeder]:
    made = Feeder(next(_instances), shares_memory=True)
    yield made
    made.close()


def memfd(nbytes: int, *, is_sealed: bool = True) -> int:
    """Shared memory of which nothing is there yet."""
    fd = os.memfd_create("test-body", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if is_sealed:
        seal(fd)
    return fd


class Buffer:
    """A builder's, with a body in it."""

    def __init__(self, body: bytes = BODY, *, is_sealed: bool = True) -> None:
        self.fd = memfd(len(body) + 100, is_sealed=is_sealed)
        self.memory = memoryview(mmap.mmap(self.fd, len(body) + 100))
        self.memory[: len(body)] = body

    def close(self) -> None:
        os.close(self.fd)
        self.memory.release()


def shared(ticket: int, number: int = 1, *, nbytes: int = len(BODY), flags: int = 0) -> bytes:
    payload = frames.pack_shared(number, nbytes)
    return frames.pack_header(FrameKind.SHARED, ticket=ticket, nbytes=len(payload), flags=flags) + payload


def answered(sock: socket.socket, connection: FeederConnection) -> bytes:
    """The next frame of the receiver."""
    connection.flush()
    return sockets.recv_exactly(sock, HEADER_NBYTES)


def mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("test-body" in line for line in maps)


def test_body_is_copied_from_the_feeders_memory_and_acknowledged(feeder: Feeder) -> None:
    sink, buffer = Sink(), Buffer()
    connection, sock = up(feeder, sink)
    socket.send_fds(sock, [shared(3)], [buffer.fd])
    step(connection)
    assert sink.came == [(3, BODY)]
    assert answered(sock, connection) == TAKEN
    second = bytes(reversed(BODY))
    buffer.memory[: len(BODY)] = second
    sock.sendall(shared(4))  # its descriptor is there
    step(connection)
    assert sink.came[1:] == [(4, second)]
    assert answered(sock, connection) == TAKEN
    connection.close()


def test_bodies_and_other_frames_keep_their_order_for_any_split(feeder: Feeder) -> None:
    sink, buffer = Sink(), Buffer()
    connection, sock = up(feeder, sink)
    stream = (
        frame(FrameKind.NOTE, b"loading", 1),
        frame(FrameKind.BODY, BODY[:999], 2),
        shared(3),
        frame(FrameKind.NOTE, b"on", 4),
    )
    sock.sendall(stream[0] + stream[1])
    socket.send_fds(sock, [stream[2][:10]], [buffer.fd])
    for piece in (stream[2][10:70], stream[2][70:], stream[3]):
        sock.sendall(piece)
    while len(sink.came) < 4:
        step(connection)
    assert sink.came == [(1, b"loading"), (2, BODY[:999]), (3, BODY), (4, b"on")]
    connection.close()


def test_unwanted_body_is_acknowledged_and_not_copied(feeder: Feeder) -> None:
    sink, buffer = Sink(takes=False), Buffer()
    connection, sock = up(feeder, sink)
    socket.send_fds(sock, [shared(3)], [buffer.fd])
    step(connection)
    assert not sink.came
    assert answered(sock, connection) == TAKEN
    connection.close()


def test_copy_from_a_feeder_that_closed_meanwhile_is_discarded(
    feeder: Feeder,
) -> None:
    """A feeder writes into its buffers again once the connection has ended."""
    sink, buffer = Sink(), Buffer()
    connection, sock = up(feeder, sink)
    socket.send_fds(sock, [shared(3)], [buffer.fd])
    sock.close()
    buffer.memory[: len(BODY)] = bytes(len(BODY))
    with pytest.raises(ConnectionError, match="while a batch was being copied"):
        step(connection)
    assert not sink.came
    connection.give_up(0.0)


@pytest.mark.parametrize("bit", [None, 8 * len(BODY) - 1], ids=["intact", "damaged"])
def test_shared_body_is_checked_against_its_digest_if_requested(feeder: Feeder, bit: int | None) -> None:
    body = bytearray(BODY)
    digests.seal(memoryview(body), 7)
    if bit is not None:
        body[bit // 8] ^= 1 << bit % 8
    sink, buffer = Sink(), Buffer(bytes(body))
    connection, sock = up(feeder, sink)
    socket.send_fds(sock, [shared(3, flags=Flag.CHECKSUM)], [buffer.fd])
    if bit is None:
        step(connection)
        assert sink.came == [(3, bytes(body))]
    else:
        with pytest.raises(RemoteProtocolError, match="batch 3 from feeder-0 arrived damaged"):
            step(connection)
        assert not sink.came
    connection.close()


def test_buffer_is_unmapped_when_dropped_or_when_the_connection_ends(feeder: Feeder) -> None:
    sink = Sink()
    connection, sock = up(feeder, sink)
    for number in (1, 2):
        buffer = Buffer()
        socket.send_fds(sock, [shared(number, number)], [buffer.fd])
        buffer.close()
        step(connection)
    assert mapped() == 2
    sock.sendall(frames.pack_header(FrameKind.UNMAP, room=1))
    step(connection)
    assert mapped() == 1
    connection.close()
    assert mapped() == 0


NO_BUFFERS = {
    "resizable": (lambda: Buffer(is_sealed=False).fd, "must be sealed against resizing, but is not"),
    "empty": (lambda: memfd(0), "a buffer of 0 bytes, 0 of them allocated"),
    "sparse": (lambda: memfd(1 << 40), f"a buffer of {1 << 40} bytes, 0 of them allocated"),
    "file": (lambda: os.open(__file__, os.O_RDONLY), "must be sealed against resizing, but is not"),
    "folder": (lambda: os.open("/", os.O_RDONLY), "must be sealed against resizing, but is not"),
    "device": (lambda: os.open("/dev/zero", os.O_RDWR), "must be sealed against resizing, but is not"),
    "pipe": (lambda: os.pipe()[0], "must be sealed against resizing, but is not"),
}


@pytest.mark.parametrize("what", NO_BUFFERS)
def test_invalid_buffer_is_refused_and_the_next_connection_uses_tcp(feeder: Feeder, what: str) -> None:
    sink, buffer = Sink(), Buffer()
    connection, sock = up(feeder, sink)
    assert connection.sock is not None
    assert connection.sock.family == socket.AF_UNIX
    socket.send_fds(sock, [shared(3)], [buffer.fd])
    step(connection)
    make, text = NO_BUFFERS[what]
    fd = make()
    socket.send_fds(sock, [shared(4, 2)], [fd])
    os.close(fd)
    with pytest.raises(RemoteProtocolError, match=text):
        step(connection)
    connection.give_up(0.0)
    again = feeder.link(connection)
    assert again.family == socket.AF_INET
    again.sendall(sealed_all(again.seals, frame(FrameKind.BODY, BODY, 4)))
    while len(sink.came) < 2:
        step(connection)
    assert sink.came == [(3, BODY), (4, BODY)]
    connection.close()


def test_broken_connection_reconnects_over_the_same_path(feeder: Feeder) -> None:
    sink = Sink()
    connection, sock = up(feeder, sink)
    for _ in range(5):
        sock.close()
        with pytest.raises(ConnectionError):
            step(connection)
        connection.give_up(0.0)
        sock = feeder.link(connection)
        assert sock.family == socket.AF_UNIX
        while connection.phase is not BodyPhase.UP:
            step(connection)
    connection.close()


def test_feeder_that_never_greets_locally_is_reached_over_tcp(feeder: Feeder) -> None:
    connection = FeederConnection(feeder.endpoint, Sink(), key=KEY, job=JOB, name="r")
    over_tcp, here = feeder.listeners
    for _ in range(MAX_NOT_GREETED):
        connection.connect(0.0)
        here.accept()[0].close()
        with pytest.raises(OSError):
            step(connection)
        connection.give_up(0.0)
    connection.connect(0.0)
    over_tcp.accept()[0].close()
    connection.close()


@pytest.mark.parametrize(
    ("data", "with_buffer", "text"),
    [
        (shared(3, nbytes=1 << 20), True, "is in a buffer of"),
        (shared(3), False, "buffer 1 arrived without its file descriptor"),
        (frame(FrameKind.SHARED, b"abc", 3), True, "a SHARED payload must have 16 bytes, but has 3"),
    ],
    ids=["beyond-the-buffer", "no-descriptor", "no-place"],
)
def test_invalid_buffer_position_ends_the_connection(
    feeder: Feeder, data: bytes, with_buffer: bool, text: str
) -> None:
    sink, buffer = Sink(), Buffer()
    connection, sock = up(feeder, sink)
    socket.send_fds(sock, [data], [buffer.fd] if with_buffer else [])
    with pytest.raises(RemoteProtocolError, match=text):
        step(connection)
    assert not sink.came
    connection.close()


def test_receiver_without_descriptors_continues_over_tcp(feeder: Feeder) -> None:
    """What is lost of one message would else be made up for by the next one's."""
    sink, buffer, other = Sink(), Buffer(), Buffer(bytes(len(BODY)))
    connection, sock = up(feeder, sink)
    socket.send_fds(sock, [shared(3)], [buffer.fd])
    step(connection)
    with no_more_descriptors():
        socket.send_fds(sock, [shared(4, 2)], [buffer.fd])
        socket.send_fds(sock, [shared(5, 3)], [other.fd])
        with pytest.raises(RemoteProtocolError, match="a file descriptor was lost"):
            connection.on_ready(select.EPOLLIN)
    assert sink.came == [(3, BODY)]
    connection.give_up(0.0)
    assert feeder.link(connection).family == socket.AF_INET
    connection.close()


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_feeder_on_another_machine_may_not_offer_shared_memory() -> None:
    made, sink = Feeder(next(_instances)), Sink()
    connection, sock = up(made, sink)
    sock.sendall(sealed_all(sock.seals, shared(3)))
    with pytest.raises(RemoteProtocolError, match="on another machine"):
        step(connection)
    connection.close()
    made.close()


def test_feeder_cannot_exhaust_the_descriptors(feeder: Feeder) -> None:
    sink, buffer = Sink(), Buffer(b"x" * 100)
    connection, sock = up(feeder, sink)
    with pytest.raises(RemoteProtocolError, match="that belong to no batch"):
        for number in range(20):
            socket.send_fds(sock, [frame(FrameKind.NOTE, b"here", number)], [buffer.fd])
            step(connection)
    connection.give_up(0.0)
    connection, sock = up(feeder, sink)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RemoteProtocolError, match=f"more than {MOST_BUFFERS} buffers"):
        for number in range(2 * MOST_BUFFERS):
            socket.send_fds(sock, [shared(number, number, nbytes=100)], [buffer.fd])
            step(connection)
    connection.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("instance", ["nobody", "x" * 200, "\udcff", "a\0b"])
def test_unknown_instance_name_is_no_error(instance: str) -> None:
    assert connect(instance) is None


class WritingOn:
    """A place in the pool; the feeder writes into its own buffer once half of that is copied here."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer, self.memory = buffer, bytearray(len(BODY))

    def __setitem__(self, where: slice, source: memoryview) -> None:
        half = len(source) // 2
        self.memory[:half] = source[:half]
        self.buffer.memory[half : half + 8] = b"changed!"
        self.memory[half : len(source)] = source[half:]

    def __getitem__(self, where: slice) -> memoryview:
        return memoryview(self.memory)[where]


class Torn(Sink):
    def __init__(self, place: WritingOn) -> None:
        super().__init__()
        self.place = place

    def connection_body(self, connection: FeederConnection, header: frames.Header) -> memoryview | None:
        return self.place  # type: ignore[return-value]

    def connection_body_done(self, connection: FeederConnection, header: frames.Header, digest: int) -> None:
        self.came.append((header.ticket, bytes(self.place.memory)))


@pytest.mark.parametrize("flags", [0, Flag.CHECKSUM], ids=["unchecked", "checked"])
def test_body_torn_while_it_is_copied_is_refused_if_checked(flags: int, feeder: Feeder) -> None:
    body = bytearray(BODY)
    digests.seal(memoryview(body), 7)
    buffer = Buffer(bytes(body))
    sink = Torn(WritingOn(buffer))
    connection, sock = up(feeder, sink)
    socket.send_fds(sock, [shared(3, flags=flags)], [buffer.fd])
    if flags:
        with pytest.raises(RemoteProtocolError, match="its bytes do not match their digest"):
            step(connection)
    else:  # said in docs/internals/protocols.md
        step(connection)
        assert b"changed!" in sink.came[0][1]
    buffer.close()
