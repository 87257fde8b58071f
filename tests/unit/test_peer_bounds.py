"""What a feeder, or code with the feeders' key, can make a sidecar or the supervisor hold is bounded."""

from __future__ import annotations

import hashlib
import json
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from feeder_link import Feeder, Sink, step, up
from patience import PATIENCE_S

from dataloaderjob.core import frames, handshake, ipc, keys, sockets, supervision
from dataloaderjob.core.crowds import Places
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import FrameKind, Header
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.core.sockets import Connection
from dataloaderjob.core.texts import MAX_CHARS
from dataloaderjob.sidecar.dispatch import overseer
from dataloaderjob.sidecar.dispatch.dispatcher import MAX_ASKED, Dispatcher
from dataloaderjob.sidecar.dispatch.instructions import Note, Send
from dataloaderjob.sidecar.dispatch.streams import Endpoint
from dataloaderjob.sidecar.feeder_connection import MAX_UNSENT_NBYTES
from dataloaderjob.sidecar.trainer_queue import MAX_NOTES, TrainerQueue
from dataloaderjob.supervisor import blob_relay
from dataloaderjob.supervisor.blob_relay import BlobRelay
from dataloaderjob.supervisor.server import MAX_METRICS_NBYTES, SupervisorServer

BUNDLE = bytes(range(16))
JOB_KEY = b"j" * 32


# A sidecar's receiver


@pytest.fixture
def machine() -> Dispatcher:
    made = Dispatcher(LoaderSettings(shared_memory_nbytes=1 << 24))
    made.set_feeders(0.0, [Endpoint("feeder-0", "i0", "h", 1)])
    made.open_stream(1, manifest=b"{}", bundle=BUNDLE, facts={}, window=4)
    made.feeder_up(0.0, "i0", {})
    made.take()
    return made


def say(machine: Dispatcher, kind: FrameKind, payload: bytes = b"", bundle: bytes = BUNDLE) -> None:
    machine.frame(0.0, "i0", Header(kind, 0, 0, 0, 0, bundle, len(payload), 0), payload)


def test_bundle_is_sent_once_a_tick_however_often_a_feeder_asks(machine: Dispatcher) -> None:
    for number in range(3 * MAX_ASKED):
        say(machine, FrameKind.NEED_BUNDLE)
        say(machine, FrameKind.NEED_BUNDLE, bundle=number.to_bytes(16, "big"))
    assert machine.take() == []
    assert len(machine.feeders["i0"].asked_bundles) == MAX_ASKED
    for sent in (1, 0):
        overseer.tick(machine, 0.1)
        found = [item for item in machine.take() if isinstance(item, Send)]
        assert [item.payload for item in found] == [b"{}"] * sent
    say(machine, FrameKind.NEED_BUNDLE)
    machine.feeder_down(0.2, "i0", "gone")
    assert not machine.feeders["i0"].asked_bundles


def test_note_is_cut_and_cleaned_before_anything_keeps_it(machine: Dispatcher) -> None:
    say(machine, FrameKind.NOTE, b"\x1b]0;title\x07a\rb\n" + b"\xff" * frames.MAX_TEXT_NBYTES)
    for number in range(1000):
        say(machine, FrameKind.NOTE, f"{number} {'x' * 9000}{frames.SINCE}{number} s".encode())
    texts = [item.text for item in machine.take() if isinstance(item, Note)]
    assert texts[0].startswith("feeder-0: a b \ufffd")
    assert max(map(len, texts)) <= MAX_CHARS + len("feeder-0: ")
    assert sum(map(len, machine._noted)) <= 64 * MAX_CHARS


def arrived(far: socket.socket, queue: TrainerQueue) -> Iterator[str]:
    """The notes that arrive, once the trainer reads."""
    is_all_sent = False
    while True:
        try:
            packet = ipc.unpack(far.recv(1 << 20))
        except BlockingIOError:
            if is_all_sent:
                return
            is_all_sent = queue.send()
            continue
        yield json.loads(packet.payload)["text"]


def test_few_notes_wait_for_a_trainer_that_does_not_read() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        queue = TrainerQueue(near, lambda: None)
        sent = [f"{number} {'x' * 3000}" for number in range(5000)]
        for text in sent:
            queue.add_note(text)
            queue.send()
        assert queue.notes == MAX_NOTES
        got = list(arrived(far, queue))
        assert got == sent[: len(got)], "the earliest, in order"
        assert len(got) > MAX_NOTES
        queue.add_note("later")
        assert list(arrived(far, queue)) == ["later"]


@pytest.mark.parametrize("kind", list(FrameKind), ids=lambda kind: kind.name)
def test_frame_larger_than_its_kind_may_be_is_refused(kind: FrameKind) -> None:
    everyone, limit = frozenset(FrameKind), frames._LIMIT_OF[kind]
    assert frames.unpack_header(frames.pack_header(kind, nbytes=limit), everyone).nbytes == limit
    with pytest.raises(RemoteProtocolError, match=f"{kind.name} frame of {limit + 1} bytes exceeds {limit}"):
        frames.unpack_header(frames.pack_header(kind, nbytes=limit + 1), everyone)
    if kind not in (FrameKind.BODY, FrameKind.TICKET, FrameKind.BUNDLE):
        assert limit <= frames.MAX_SNAPSHOT_NBYTES + 64


def test_feeder_that_reads_nothing_is_not_read_from() -> None:
    feeder = Feeder()
    connection, far = up(feeder, Sink())
    piece = bytes(1 << 20)
    while connection.interest & select.EPOLLIN:
        connection.send(frames.pack_header(FrameKind.BUNDLE, nbytes=len(piece)), piece)
        connection.flush()
        assert len(connection._out) <= MAX_UNSENT_NBYTES + len(piece) + 1000
    reader = threading.Thread(target=lambda: [None for _ in iter(lambda: far.recv(1 << 20), b"")])
    reader.start()
    while not connection.interest & select.EPOLLIN:
        step(connection)
    connection.close()
    reader.join(PATIENCE_S)
    feeder.close()


# The supervisor


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SupervisorServer:
    monkeypatch.setattr(supervision, "MAX_OF_FEEDERS", 3)
    state: Any = SimpleNamespace(listing=lambda: {"type": "feeders"}, metrics=lambda *_: None)
    return SupervisorServer("127.0.0.1", 0, job_key=JOB_KEY, job="job", blob_folder=tmp_path, state=state)


def connected(server: SupervisorServer, role: str) -> Connection:
    sock = handshake.connect(
        ("127.0.0.1", server.port), keys.of_job(JOB_KEY), role=role, name=role, job="job"
    )
    sock.settimeout(PATIENCE_S)
    return sock


def ended(sock: Connection) -> bool:
    """Waits until the supervisor has closed the connection."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("role", ["feeder", "blob", "upload", "control", "sidecar"])
def test_message_longer_than_its_role_may_send_ends_the_connection(
    server: SupervisorServer, role: str
) -> None:
    limit = MAX_METRICS_NBYTES if role == "sidecar" else supervision.MAX_REQUEST_NBYTES
    with connected(server, role) as sock:
        assert sock.seals is not None
        sock.sendall(sock.seals.out.seal(sockets.LENGTH.pack(limit + 1)))  # none of it needs to arrive
        assert ended(sock)


@pytest.mark.parametrize("role", ["feeder", "blob"])
def test_connections_with_the_feeders_key_are_limited_by_address(server: SupervisorServer, role: str) -> None:
    held = [connected(server, role) for _ in range(3)]
    with connected(server, role) as more:
        assert ended(more)
    with connected(server, "sidecar") as other:
        assert sockets.recv_message(other)["type"] == "feeders", "other roles are served"
    held.pop().close()
    for _ in range(1000):  # until the supervisor has noticed
        with connected(server, role) as again:
            again.settimeout(0.05)
            try:
                again.recv(1)
            except TimeoutError:
                break
    else:
        pytest.fail("the place is free again")
    for sock in held:
        sock.close()


def test_places_are_counted_by_address_and_returned() -> None:
    places = Places(2)
    with places.one("a") as first, places.one("a") as second, places.one("a") as third, places.one("b") as b:
        assert (first, second, third, b) == (True, True, False, True)
    assert not places._taken
    with places.one("a") as again:
        assert again


def test_claimed_sources_of_a_blob_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_relay, "MAX_SOURCES", 5)
    relay, data = BlobRelay(tmp_path), b"blob"
    digest, nbytes = hashlib.sha256(data).hexdigest(), len(data)
    relay._store.put(data)
    for port in range(20):
        near, far = socket.socketpair()
        with near, far:
            asks = threading.Thread(target=relay.serve, args=(far, digest, nbytes, ("10.0.0.1", port)))
            asks.start()
            while sockets.recv_message(near)["type"] == "peer":
                sockets.send_message(near, {"type": "stored"})
                break
            else:
                sockets.recv_exactly(near, nbytes)
                sockets.send_message(near, {"type": "stored"})
            asks.join(PATIENCE_S)
    assert len(relay._sources[digest]) <= 5
