"""What a feeder says to a receiver on its machine of batches that lie in its memory, over a real Unix socket."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from feeder_client import Frame, Large, Receiver, Squares, bundle_of
from feeder_serving import KEY, Served, blobs, serving
from forwarder import copy

from dataloaderjob.core import frames, handshake, sockets
from dataloaderjob.core.control import sealed
from dataloaderjob.core.errors import AuthError
from dataloaderjob.core.frames import FROM_FEEDER, HEADER_NBYTES, FrameKind
from dataloaderjob.feeder.connections import SHARED_FROM_NBYTES

LARGE_NBYTES = 2 * SHARED_FROM_NBYTES


class ReceiverHere(Receiver):
    """It maps the buffers that it is given."""

    def __init__(self, server: Served) -> None:
        super().__init__(0, KEY, host=sockets.on_machine(server.instance))
        self.buffers: dict[int, mmap.mmap] = {}

    def read(self) -> Frame:
        head, fds, _, _ = socket.recv_fds(self.sock, HEADER_NBYTES, 1)
        head += sockets.recv_exactly(self.sock, HEADER_NBYTES - len(head))
        header = frames.unpack_header(head, FROM_FEEDER)
        payload = sockets.recv_exactly(self.sock, header.nbytes)
        if fds:
            assert header.kind == FrameKind.SHARED
            assert sealed(fds[0])
            number, _ = frames.unpack_shared(payload)
            assert number not in self.buffers, "its descriptor came before"
            with pytest.raises(PermissionError):
                mmap.mmap(fds[0], 0)
            self.buffers[number] = mmap.mmap(fds[0], 0, prot=mmap.PROT_READ)
            os.close(fds[0])
        if header.kind == FrameKind.UNMAP:
            self.buffers.pop(header.room).close()
        return Frame(FrameKind(header.kind), header, payload)

    def body(self) -> Frame:
        """The next one, as it lies there."""
        while (told := self.next()).kind is FrameKind.UNMAP:
            pass
        assert told.kind is FrameKind.SHARED
        number, nbytes = frames.unpack_shared(told.payload)
        return Frame(FrameKind.BODY, told.header, self.buffers[number][:nbytes])

    def taken(self) -> None:
        self.send(FrameKind.TAKEN)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture
def receiver(server: Served) -> Iterator[ReceiverHere]:
    with ReceiverHere(server) as made:
        yield made


def test_large_batch_is_passed_in_shared_memory_and_a_small_one_is_sent(
    receiver: ReceiverHere, tmp_path: Path
) -> None:
    large = receiver.know(bundle_of(Large(LARGE_NBYTES), blobs(tmp_path)))
    small = receiver.know(bundle_of(Squares(), blobs(tmp_path)))
    receiver.ticket(0, [7], large)
    assert receiver.body().batch().tolist() == [[7] * LARGE_NBYTES]
    receiver.taken()
    receiver.ticket(1, [3, 4], small)
    sent = receiver.next()
    assert (sent.kind, sent.batch().tolist()) == (FrameKind.BODY, [9, 16])


def test_buffer_is_reused_only_after_its_batch_is_taken(receiver: ReceiverHere, tmp_path: Path) -> None:
    bundle = receiver.know(bundle_of(Large(LARGE_NBYTES), blobs(tmp_path)))
    for k in range(12):
        receiver.ticket(k, [k], bundle)
    told = [receiver.body(), receiver.body()]
    assert [body.batch()[0, 0] for body in told] == [0, 1]
    assert receiver.quiet(), "two wait to be taken: no third is made"
    lie_there = [bytes(memory[: len(told[0].payload)]) for memory in receiver.buffers.values()]
    assert lie_there == [body.payload for body in told]
    for k in range(2, 12):
        receiver.taken()
        assert receiver.body().batch()[0, -1] == k
    assert len(receiver.buffers) <= 4, "they are used again"


def test_unused_buffers_are_announced_for_unmapping(receiver: ReceiverHere, tmp_path: Path) -> None:
    sizes = [LARGE_NBYTES * 8**k for k in range(4)]
    for k, nbytes in enumerate(sizes):
        bundle = receiver.know(bundle_of(Large(nbytes), blobs(tmp_path)))
        receiver.ticket(k, [k], bundle)
        receiver.body()
        receiver.taken()
        receiver.send(FrameKind.RELEASE, bundle=bundle)
    while receiver.buffers:
        assert receiver.read().kind is FrameKind.UNMAP


def test_receiver_that_leaves_without_answering_blocks_no_later_batch(server: Served, tmp_path: Path) -> None:
    bundle = bundle_of(Large(LARGE_NBYTES), blobs(tmp_path))
    with ReceiverHere(server) as gone:
        gone.know(bundle)
        for k in range(3):
            gone.ticket(k, [k], bundle.id)
        gone.body(), gone.body()
    with ReceiverHere(server) as other:
        other.know(bundle)
        for k in range(6):
            other.ticket(k, [k], bundle.id)
            assert other.body().batch()[0, 0] == k
            other.taken()


def test_taking_a_batch_never_offered_ends_the_connection(receiver: ReceiverHere) -> None:
    receiver.taken()
    assert receiver.sock.recv(1) == b""


def test_cancelled_batch_already_offered_must_still_be_taken(receiver: ReceiverHere, tmp_path: Path) -> None:
    bundle = receiver.know(bundle_of(Large(LARGE_NBYTES), blobs(tmp_path)))
    receiver.ticket(0, [5], bundle)
    body = receiver.body()
    receiver.cancel(0)
    assert receiver.next().kind is FrameKind.CANCELLED
    receiver.ticket(0, [6], bundle)  # the same one anew, in another buffer
    again = receiver.body()
    assert (body.batch()[0, 0], again.batch()[0, 0]) == (5, 6)
    receiver.taken()
    receiver.taken()
    receiver.ticket(1, [7], bundle)
    assert receiver.body().batch()[0, 0] == 7


def test_feeder_that_shares_no_memory_is_reached_over_tcp_only(tmp_path: Path) -> None:
    with serving(tmp_path, "feeder-1", shares_memory=False) as server:
        with pytest.raises(ConnectionRefusedError):
            ReceiverHere(server)
        with Receiver(server.port, KEY) as receiver:
            bundle = receiver.know(bundle_of(Large(LARGE_NBYTES), blobs(tmp_path)))
            receiver.ticket(0, [7], bundle)
            assert receiver.next().kind is FrameKind.BODY


@contextlib.contextmanager
def relayed(listener: socket.socket, far: socket.socket) -> Iterator[None]:
    """A process without any key carries the bytes of one connection from `listener` to `far` and back."""

    def carry() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as receiver:
            threading.Thread(target=copy, args=(far, receiver), daemon=True).start()
            copy(receiver, far)

    with listener, far:
        threading.Thread(target=carry, daemon=True).start()
        yield


def on_machine(server: Served) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sockets.on_machine(server.instance))
    return sock


def test_name_on_a_machine_relayed_to_a_port_is_refused(tmp_path: Path) -> None:
    """Somebody takes the name of a feeder of another machine, whose frames have seals."""
    with serving(tmp_path, "feeder-2", shares_memory=False) as server:
        far = socket.create_connection(("127.0.0.1", server.port))
        listener = sockets.listen(sockets.on_machine(server.instance), 0)
        refused = pytest.raises(
            AuthError, match=r"uses TCP and the peer uses a Unix socket .*: something relays"
        )
        with relayed(listener, far), refused:
            ReceiverHere(server)


def test_port_relayed_to_a_name_on_a_machine_is_refused(server: Served) -> None:
    """Somebody on the path would drop the seals."""
    listener = socket.create_server(("127.0.0.1", 0))
    refused = pytest.raises(AuthError, match=r"uses a Unix socket .* and the peer uses TCP: something relays")
    with relayed(listener, on_machine(server)), refused:
        Receiver(listener.getsockname()[1], KEY)


def test_name_on_a_machine_serves_receivers_only(server: Served) -> None:
    refused = pytest.raises(AuthError, match="role 'blob' is not served here, only receiver")
    with sockets.Connection.of(on_machine(server)) as sock, refused:
        handshake.greet(sock, KEY, role="blob", name="feeder-1", job="job", versions=handshake.DATA)
