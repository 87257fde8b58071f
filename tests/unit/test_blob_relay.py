"""Blobs on their way over the supervisor: one upload, whoever waits for it."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dataloaderjob.core import sockets
from dataloaderjob.supervisor import server
from dataloaderjob.supervisor.server import BlobRelay

BLOB = bytes(range(256)) * 4096
DIGEST = hashlib.sha256(BLOB).hexdigest()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ASK_AGAIN_S", 0.8)
    monkeypatch.setattr(server, "WAIT_S", 3.0)


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
    """What a feeder gets."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        serving = threading.Thread(target=relay.serve, args=(theirs, DIGEST, len(BLOB)))
        serving.start()
        if sockets.recv_message(ours)["type"] != "blob":
            serving.join()
            return None
        data = sockets.recv_exactly(ours, len(BLOB))
        serving.join()
        return data


def test_64_feeders_that_miss_a_blob_wait_for_one_upload(tmp_path: Path) -> None:
    relay = BlobRelay(tmp_path / "blobs")
    sidecars = Sidecars(relay, 3, pause_s=0.02)
    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(lambda _: fetched(relay), range(64)))
    assert all(data == BLOB for data in found)
    assert len(sidecars.asked) == 1


def test_an_upload_that_goes_on_is_waited_for_however_long_it_takes(tmp_path: Path) -> None:
    relay = BlobRelay(tmp_path / "blobs")
    sidecars = Sidecars(relay, 2, pause_s=0.5)  # 4 s in all: more than may pass without a part of it
    assert fetched(relay) == BLOB
    assert len(sidecars.asked) == 1


def test_a_sidecar_of_which_nothing_comes_is_given_up_for_another(tmp_path: Path) -> None:
    relay = BlobRelay(tmp_path / "blobs")
    sidecars = Sidecars(relay, 2, silent=frozenset({0}))
    assert fetched(relay) == BLOB
    assert sidecars.asked == [0, 1]


def test_where_nothing_comes_a_feeder_is_told(tmp_path: Path) -> None:
    relay = BlobRelay(tmp_path / "blobs")
    Sidecars(relay, 1, silent=frozenset({0}))
    begun = time.monotonic()
    assert fetched(relay) is None
    assert time.monotonic() - begun < 5.0
