"""A feeder's process, and receivers that speak frames to it over real sockets."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from feeder_client import (
    PLENTY,
    Gated,
    Large,
    Receiver,
    Squares,
    bundle_of,
    checksum_holds,
    wait_until,
)
from feeder_serving import KEY, Connect, Served, blobs, connecting, serving
from sealing import sealed, sealed_all

from dataloaderjob.core import frames, handshake, sockets
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import AuthError
from dataloaderjob.core.frames import HEADER_NBYTES, Flag, FrameKind


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture
def connect(server: Served) -> Iterator[Connect]:
    with connecting(server) as made:
        yield made


@pytest.fixture
def squares(tmp_path: Path) -> Bundle:
    return bundle_of(Squares(), blobs(tmp_path))


def test_tickets_return_the_batches_that_torch_would_make(connect: Connect, squares: Bundle):
    with connect() as receiver:
        bundle = receiver.know(squares)
        for k in range(5):
            receiver.ticket(k, [k, k + 1], bundle)
        for k in range(5):
            frame = receiver.next()
            assert (frame.kind, frame.header.ticket, frame.header.bundle) == (FrameKind.BODY, k, bundle)
            assert frame.batch().tolist() == [k * k, (k + 1) ** 2]


def test_the_handshake_names_the_feeder_and_its_versions(server: Served, connect: Connect):
    facts = connect().facts
    assert facts["feeder"] == "feeder-0"
    assert facts["pid"] == server.pid
    assert facts["torch"] == ".".join(torch.__version__.split(".")[:2])


def test_bundle_is_requested_once_while_its_tickets_wait(connect: Connect, squares: Bundle):
    with connect() as receiver:
        bundle = receiver.know(squares)
        for k in range(3):
            receiver.ticket(k, [k], bundle)
        assert receiver.read().kind is FrameKind.NEED_BUNDLE
        assert receiver.quiet()
        receiver.send_bundle(bundle)
        kinds: list[FrameKind] = []
        while len(kinds) < 3:
            kind = receiver.read().kind
            if kind is not FrameKind.NOTE:  # on a busy machine, loading is announced
                kinds.append(kind)
        assert kinds == [FrameKind.BODY] * 3
        receiver.ticket(3, [3], bundle)
        assert receiver.read().kind is FrameKind.BODY


def test_manifest_of_a_different_bundle_ends_the_link(connect: Connect, squares: Bundle, tmp_path: Path):
    other = bundle_of(Squares(5), blobs(tmp_path))
    with connect() as receiver:
        receiver.ticket(0, [0], squares.id)
        assert receiver.read().kind is FrameKind.NEED_BUNDLE
        receiver.send(FrameKind.BUNDLE, other.manifest(), bundle=squares.id)
        with pytest.raises(ConnectionError):
            receiver.read()


def test_body_above_its_room_is_announced_and_waits_for_a_grant(connect: Connect, tmp_path: Path):
    with connect() as receiver:
        bundle = receiver.know(bundle_of(Large(100_000), blobs(tmp_path)))
        receiver.ticket(0, [7], bundle, room=1000)
        announced = receiver.next()
        assert announced.kind is FrameKind.ANNOUNCE
        assert announced.header.room > 100_000
        assert receiver.quiet()
        receiver.grant(0, room=announced.header.room)
        body = receiver.next()
        assert (body.kind, body.header.nbytes) == (FrameKind.BODY, announced.header.room)


def test_two_ungranted_batches_of_one_receiver_do_not_block_another(connect: Connect, tmp_path: Path):
    with connect() as hoarder, connect() as other:
        bundle = hoarder.know(bundle_of(Large(1000), blobs(tmp_path)))
        other.know(hoarder.bundles[bundle])
        for k in range(5):
            hoarder.ticket(k, [k], bundle, room=0)
        assert [hoarder.next().kind for _ in range(2)] == [FrameKind.ANNOUNCE] * 2
        assert hoarder.quiet()
        other.ticket(0, [0], bundle)
        assert other.next().kind is FrameKind.BODY
        hoarder.grant(1)
        assert [hoarder.next()[:1] for _ in range(2)] == [(FrameKind.BODY,), (FrameKind.ANNOUNCE,)]


def test_receiver_that_reads_nothing_does_not_block_another(connect: Connect, tmp_path: Path):
    with connect() as frozen, connect() as other:
        bundle = frozen.know(bundle_of(Large(30_000_000), blobs(tmp_path)))
        other.know(frozen.bundles[bundle])
        frozen.ticket(0, [0], bundle)
        assert frozen.read().kind is FrameKind.NEED_BUNDLE
        frozen.send_bundle(bundle)
        for k in range(1, 8):
            frozen.ticket(k, [k], bundle)
        for k in range(3):
            other.ticket(k, [k], bundle)
            assert other.next().header.ticket == k
        assert [frozen.next().header.ticket for _ in range(8)] == list(range(8))


def test_bodies_of_many_megabytes_arrive_whole_and_checked(connect: Connect, tmp_path: Path):
    with connect() as receiver:
        bundle = receiver.know(bundle_of(Large(40_000_000), blobs(tmp_path)))
        for k in range(3):
            receiver.ticket(k, [k], bundle, flags=Flag.CHECKSUM)
        for k in range(3):
            frame = receiver.next()
            assert checksum_holds(frame)
            batch = frame.batch()
            assert batch.shape == (1, 40_000_000)
            assert bool((batch == k).all())


def test_an_announced_body_is_checked_too(connect: Connect, tmp_path: Path):
    with connect() as receiver:
        bundle = receiver.know(bundle_of(Large(10_000), blobs(tmp_path)))
        receiver.ticket(0, [1, 2], bundle, room=0, flags=Flag.CHECKSUM)
        assert receiver.next().kind is FrameKind.ANNOUNCE
        receiver.grant(0)
        assert checksum_holds(receiver.next())


def test_a_batch_of_thousands_of_buffers_arrives_whole(connect: Connect, tmp_path: Path):
    def collate(samples: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.full((1000,), int(samples[0]) + i) for i in range(3000)]

    with connect() as receiver:
        bundle = receiver.know(bundle_of(Squares(), blobs(tmp_path), collate_fn=collate))
        receiver.ticket(0, [3], bundle)
        batch = receiver.next().batch()
        assert [int(t[999]) for t in batch] == [9 + i for i in range(3000)]


def test_a_probed_ticket_reports_each_sample_before_it_is_made(connect: Connect, squares: Bundle):
    with connect() as receiver:
        bundle = receiver.know(squares)
        receiver.ticket(0, [5, 6, 7], bundle, flags=Flag.PROBE)
        told = [receiver.next() for _ in range(4)]
        assert [f.kind for f in told] == [FrameKind.PROGRESS] * 3 + [FrameKind.BODY]
        assert [f.header.room for f in told[:3]] == [0, 1, 2]


def test_a_cancelled_ticket_is_not_built_and_not_sent(connect: Connect, tmp_path: Path):
    gate = tmp_path / "gate"
    with connect() as receiver:
        bundle = receiver.know(bundle_of(Gated(gate), blobs(tmp_path)))
        receiver.ticket(0, [0], bundle, flags=Flag.PROBE)
        receiver.ticket(1, [1], bundle)
        receiver.ticket(2, [2], bundle)
        assert receiver.next().kind is FrameKind.PROGRESS
        receiver.cancel(0)
        receiver.cancel(1)
        receiver.ticket(3, [3], bundle)
        receiver.ticket(4, [4], b"unknown bundle 123")
        assert receiver.read().kind is FrameKind.NEED_BUNDLE, "all frames before were read"
        gate.touch()
        told = [receiver.next() for _ in range(4)]
        assert [(f.kind, f.header.ticket) for f in told] == [
            (FrameKind.CANCELLED, 0),
            (FrameKind.CANCELLED, 1),
            (FrameKind.BODY, 2),
            (FrameKind.BODY, 3),
        ]
        assert receiver.quiet()


def test_blobs_found_nowhere_fail_the_ticket_without_a_supervisor(connect: Connect, tmp_path: Path):
    with connect() as receiver:
        bundle = receiver.know(bundle_of(Squares(), tmp_path / "elsewhere"))
        receiver.ticket(0, [1], bundle)
        frame = receiver.next()
        assert frame.kind is FrameKind.FAILED
        assert "no supervisor" in json.loads(frame.payload)["message"]


def test_receiver_that_disconnects_leaves_no_descriptors(server: Served, connect: Connect, tmp_path: Path):
    bundle = bundle_of(Large(1_000_000), blobs(tmp_path))
    with connect() as receiver:
        receiver.ticket(0, [0], receiver.know(bundle))
        receiver.next()
    before = len(os.listdir(f"/proc/{server.pid}/fd"))
    tickets = 4
    """A buffer for each stays with the session, which waits for a receiver to come back."""
    for _ in range(20):
        with connect() as receiver:
            known = receiver.know(bundle)
            for k in range(tickets):
                receiver.ticket(k, [k], known, room=0 if k % 2 else PLENTY)
            receiver.next()
    wait_until(
        lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= before + tickets, 10, "descriptors are closed"
    )


def test_a_peer_without_the_key_is_refused(server: Served):
    with pytest.raises(AuthError, match="key"):
        Receiver(server.port, bytes(32))
    with pytest.raises(AuthError, match="job 'job'"):
        Receiver(server.port, KEY, job="another")


def test_silent_or_babbling_peer_is_cut_off_without_delaying_others(
    server: Served, connect: Connect, squares: Bundle
):
    slow = socket.create_connection(("127.0.0.1", server.port))
    babbling = socket.create_connection(("127.0.0.1", server.port))
    babbling.sendall(struct.pack("<I", 1 << 30) + b"x" * 100)
    with connect() as receiver:
        bundle = receiver.know(squares)
        receiver.ticket(0, [1], bundle)
        assert receiver.next().kind is FrameKind.BODY
    for sock in (slow, babbling):
        sock.settimeout(2 * handshake.HANDSHAKE_TIMEOUT_S)
        with pytest.raises(ConnectionError):
            while True:
                sockets.recv_exactly(sock, 1)
        sock.close()


@pytest.mark.parametrize("damage", ["magic", "kind", "length"])
def test_a_corrupt_frame_ends_its_link_only(connect: Connect, squares: Bundle, damage: str):
    with connect() as bad, connect() as good:
        header = {
            "magic": b"x" * HEADER_NBYTES,
            "kind": frames.pack_header(FrameKind.BODY),
            "length": frames.pack_header(FrameKind.TICKET, nbytes=frames.MAX_CONTROL_NBYTES + 1),
        }[damage]
        bad.say(header)
        with pytest.raises(ConnectionError):
            bad.read()
        bundle = good.know(squares)
        good.ticket(0, [2], bundle)
        assert good.next().batch().tolist() == [4]


def test_receiver_that_takes_no_answers_is_not_read_further(
    server: Served, connect: Connect, squares: Bundle
):
    def memory() -> int:
        return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * 4096

    with connect() as bad, connect() as good:
        bundle = good.know(squares)
        good.ticket(0, [2], bundle)
        assert good.next().batch().tolist() == [4]
        before = memory()
        order = frames.pack_header(FrameKind.CANCEL, stream=9, ticket=7) * 1000
        bad.sock.settimeout(1)
        with pytest.raises(TimeoutError):
            for _ in range(2000):  # 128 MB
                bad.sock.sendall(sealed_all(bad.sock.seals, order))
        good.ticket(1, [3], bundle)
        assert good.next().batch().tolist() == [9]
        assert memory() - before < 30e6


def test_frames_cut_at_any_byte_are_understood(connect: Connect, squares: Bundle):
    with connect() as receiver:
        bundle = receiver.know(squares)
        receiver.ticket(0, [1], bundle)
        assert receiver.next().kind is FrameKind.BODY
        sent = bytearray()
        receiver.say = lambda header, payload=b"": sent.extend(  # type: ignore[method-assign]
            sealed(receiver.sock.seals, header, payload)
        )
        receiver.ticket(1, [1, 2, 3], bundle)
        receiver.ticket(2, [4], bundle)
        for byte in sent:
            receiver.sock.send(bytes([byte]))
        assert [receiver.next().header.ticket for _ in range(2)] == [1, 2]
