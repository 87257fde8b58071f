"""Blobs on their way over the supervisor: one upload, whoever waits for it, and feeders that hand them on."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dataloaderjob.core import sockets
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.supervisor import blob_relay
from dataloaderjob.supervisor.blob_relay import HERE, MAX_SERVED, Address, BlobRelay, Source

BLOB = bytes(range(256)) * 4096
DIGEST = hashlib.sha256(BLOB).hexdigest()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_relay, "ASK_AGAIN_S", 0.8)
    monkeypatch.setattr(blob_relay, "WAIT_S", 3.0)


class Sidecars:
    """Those that have the blob, and what they were asked for."""

    def __init__(
        self, relay: BlobRelay, count: int, *, pause_s: float = 0.0, silent: frozenset[int] = frozenset()
    ):
        self.relay, self.pause_s, self.silent = relay, pause_s, silent
        self.asked: list[int] = []
        for number in range(count):
            relay.has(number, DIGEST, self._want(number))

    def _want(self, number: int) -> Callable[[str], None]:
        def want(_: str) -> None:
            self.asked.append(number)
            if number not in self.silent:
                threading.Thread(target=self._upload).start()

        return want

    def _upload(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            receiving = threading.Thread(target=self.relay.receive, args=(theirs, DIGEST, len(BLOB)))
            receiving.start()
            for at in range(0, len(BLOB), len(BLOB) // 8):
                ours.sendall(BLOB[at : at + len(BLOB) // 8])
                time.sleep(self.pause_s)
            receiving.join()


def fetched(relay: BlobRelay) -> bytes | None:
    """What a feeder gets that hands nothing on."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serving = threading.Thread(target=relay.serve, args=(theirs, DIGEST, len(BLOB), None))
        serving.start()
        if sockets.recv_message(ours)["type"] != "blob":
            serving.join()
            return None
        data = sockets.recv_exactly(ours, len(BLOB))
        serving.join()
        return data


def test_64_feeders_missing_a_blob_wait_for_one_upload(tmp_path: Path) -> None:
    relay = BlobRelay(tmp_path / "blobs")
    sidecars = Sidecars(relay, 3, pause_s=0.02)
    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(lambda _: fetched(relay), range(64)))
    assert all(data == BLOB for data in found)
    assert len(sidecars.asked) == 1


def test_upload_in_progress_is_awaited_without_limit(tmp_path: Path) -> None:
    relay = BlobRelay(tmp_path / "blobs")
    sidecars = Sidecars(relay, 2, pause_s=0.5)  # 4 s in all: more than may pass without a part of it
    assert fetched(relay) == BLOB
    assert len(sidecars.asked) == 1


def test_silent_sidecar_is_abandoned_for_another(tmp_path: Path) -> None:
    relay = BlobRelay(tmp_path / "blobs")
    sidecars = Sidecars(relay, 2, silent=frozenset({0}))
    assert fetched(relay) == BLOB
    assert sidecars.asked == [0, 1]


def test_head_drops_blobs_not_requested_lately(tmp_path: Path) -> None:
    relay = BlobRelay(tmp_path / "blobs")
    old = BlobStore(tmp_path / "blobs").put(b"of an epoch long ago")[0]
    os.utime(tmp_path / "blobs" / old, (0, 0))
    Sidecars(relay, 1)
    assert fetched(relay) == BLOB
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [DIGEST]


def test_feeder_gets_an_error_if_no_source_delivers(tmp_path: Path) -> None:
    relay = BlobRelay(tmp_path / "blobs")
    Sidecars(relay, 1, silent=frozenset({0}))
    begun = time.monotonic()
    assert fetched(relay) is None
    assert time.monotonic() - begun < 5.0


class Network:
    """Feeders that get a blob by the relay's word, from it or from each other; a copy takes `copy_s`."""

    def __init__(
        self, relay: BlobRelay, *, copy_s: float = 0.02, broken: frozenset[Address] = frozenset()
    ) -> None:
        self.relay, self.copy_s, self.broken = relay, copy_s, broken
        self._lock = threading.Lock()
        self._serving: Counter[Source] = Counter()
        self.served: Counter[Source] = Counter()
        self.most: Counter[Source] = Counter()
        """How many each has served at once, at most."""

    def feeder(self, number: int) -> list[Source]:
        """One that lacks the blob; returns whom it was sent to, in order, until it had it."""
        ours, theirs = socket.socketpair()
        ours.settimeout(20.0)
        sources: list[Source] = []
        with ours, theirs:
            address = ("feeder", number)
            thread = threading.Thread(target=self.relay.serve, args=(theirs, DIGEST, len(BLOB), address))
            thread.start()
            while not sources or sources[-1] in self.broken:
                if sources:
                    sockets.send_message(ours, {"type": "get"})
                answer = sockets.recv_message(ours)
                if answer["type"] == "blob":
                    assert sockets.recv_exactly(ours, len(BLOB)) == BLOB
                    sources.append(HERE)
                else:
                    sources.append((answer["host"], answer["port"]))
                self._copy(sources[-1])
            sockets.send_message(ours, {"type": "stored"})
            thread.join()
        return sources

    def _copy(self, source: Source) -> None:
        with self._lock:
            self._serving[source] += 1
            self.served[source] += 1
            self.most[source] = max(self.most[source], self._serving[source])
        time.sleep(self.copy_s)
        with self._lock:
            self._serving[source] -= 1


def relay_with_the_blob(folder: Path) -> BlobRelay:
    relay = BlobRelay(folder)
    (folder / DIGEST).write_bytes(BLOB)
    return relay


def test_feeders_pass_a_blob_on_so_the_head_sends_it_to_few(tmp_path: Path) -> None:
    network = Network(relay_with_the_blob(tmp_path / "blobs"), copy_s=0.1)
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(network.feeder, range(64)))
    assert network.served.total() == 64
    assert network.served[HERE] <= 16
    assert max(network.most.values()) <= MAX_SERVED


def test_feeder_that_fails_to_pass_a_blob_on_is_not_named_again(tmp_path: Path) -> None:
    gone = ("feeder", 0)
    network = Network(relay_with_the_blob(tmp_path / "blobs"), copy_s=0.0, broken=frozenset({gone}))
    assert network.feeder(0) == [HERE]
    assert network.feeder(1) == [gone, HERE]
    assert network.feeder(2) == [("feeder", 1)]


def test_feeder_leaving_during_a_transfer_frees_its_place(tmp_path: Path) -> None:
    relay = relay_with_the_blob(tmp_path / "blobs")
    for _ in range(MAX_SERVED):
        ours, theirs = socket.socketpair()
        with theirs:
            thread = threading.Thread(target=suppressed, args=(relay, theirs))
            thread.start()
            sockets.recv_message(ours)
            ours.close()
            thread.join()
    assert Network(relay).feeder(1) == [HERE]


def test_slow_feeders_do_not_block_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_relay, "PLACE_WAIT_S", 0.3)
    relay = relay_with_the_blob(tmp_path / "blobs")
    slow, threads = [socket.socketpair() for _ in range(MAX_SERVED)], list[threading.Thread]()
    for n, (ours, theirs) in enumerate(slow):
        threads.append(threading.Thread(target=suppressed, args=(relay, theirs, n)))
        threads[-1].start()
        sockets.recv_message(ours)
    assert Network(relay).feeder(1) == [HERE]
    for ours, _ in slow:
        ours.close()
    for thread in threads:
        thread.join()
    for _, theirs in slow:
        theirs.close()


def test_feeder_tries_at_most_two_lost_sources(tmp_path: Path) -> None:
    gone = frozenset(("gone", n) for n in range(10))
    network = Network(relay_with_the_blob(tmp_path / "blobs"), copy_s=0.1, broken=gone)
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(network.feeder, range(10)))
    for address in gone:
        network.relay._sources[DIGEST][address] = 0
    sources = network.relay._sources[DIGEST]
    for n in range(10):  # the others are busy
        sources["feeder", n] = MAX_SERVED
    found = network.feeder(11)
    assert len(found) == 3
    assert set(found[:2]) < gone
    assert found[2] is HERE


def test_a_feeder_that_has_left_is_not_named(tmp_path: Path) -> None:
    network = Network(relay_with_the_blob(tmp_path / "blobs"), copy_s=0.0)
    assert network.feeder(0) == [HERE]
    network.relay.left(("feeder", 0))
    assert network.feeder(1) == [HERE]


def test_source_that_delivers_too_slowly_is_not_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(relay_with_the_blob(tmp_path / "blobs"), copy_s=0.0)
    assert network.feeder(0) == [HERE]
    monkeypatch.setattr(blob_relay, "IDLE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(blob_relay, "SLOWEST", 1e12)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        network.relay.serve(theirs, DIGEST, len(BLOB), ("feeder", 1))
    assert network.feeder(2) == [HERE]


def suppressed(relay: BlobRelay, sock: socket.socket, number: int = 9) -> None:
    with pytest.raises(OSError):
        relay.serve(sock, DIGEST, len(BLOB), ("feeder", number))
