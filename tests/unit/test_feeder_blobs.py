"""Feeders of several nodes get user code and data from the head and from one another: real processes, one machine."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from feeder_client import Receiver, Squares, bundle_of, wait_until
from feeder_serving import JOB_KEY, KEY, Served, blobs, host, serving, settings_in

from dataloaderjob.core import handshake, keys, sockets
from dataloaderjob.core.acceptor import Acceptor
from dataloaderjob.core.blobs import NODE_KEEP_S, BlobStore, Bundle
from dataloaderjob.feeder import blobs as feeder_blobs
from dataloaderjob.feeder.blobs import BlobFetcher
from dataloaderjob.feeder.bundles import BundleStore
from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.providers.ray.actor import at_home
from dataloaderjob.supervisor.server import SupervisorServer


class Heard:
    """What a supervisor's connections tell it, as far as feeders that fetch need an answer."""

    def __init__(self) -> None:
        self.link_keys: dict[int, bytes] = {}
        """The keys of connections to feeders, by port."""

    def feeder_ready(self, endpoint: Any) -> bool:
        own = keys.derive(JOB_KEY, keys.Holder.SIDECAR)
        self.link_keys[endpoint.port] = keys.unwrap(own, endpoint.link, endpoint.instance)
        return True

    def feeder_left(self, name: str, instance: str) -> None: ...
    def costs(self, instance: str, costs: dict[str, int] | None) -> None: ...


@pytest.fixture
def head(tmp_path: Path) -> SupervisorServer:
    state: Any = Heard()
    return SupervisorServer(
        "127.0.0.1", 0, job_key=JOB_KEY, job="job", blob_folder=tmp_path / "head", state=state
    )


@contextmanager
def node(folder: Path, name: str, head: SupervisorServer) -> Iterator[Served]:
    folder.mkdir()
    with serving(folder, name, supervisor_host="127.0.0.1", supervisor_port=head.port) as served:
        yield served


def await_nodes(head: SupervisorServer, digest: str, count: int) -> None:
    """Waits until the head has heard of so many nodes that they have a blob."""
    known = head._relay._sources
    wait_until(lambda: len(known.get(digest, {})) > count, 10, f"{count} nodes have said that they have it")


class FullDisk(BlobStore):
    def write(self, digest: str, chunks: Iterable[bytes | memoryview], *, check: bool = True) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_node_with_a_full_disk_blames_no_other_node(head: SupervisorServer, tmp_path: Path):
    digest, nbytes = BlobStore(tmp_path / "head").put(b"weights")
    with node(tmp_path / "feeder-0", "feeder-0", head) as first:
        fetcher(head, tmp_path, BlobStore(tmp_path / "node-1"), first.port).fetch(
            digest, nbytes, wanted=lambda: True
        )
        await_nodes(head, digest, 1)
        (blobs(tmp_path / "feeder-0") / digest).write_bytes(b"weights")
        full = fetcher(head, tmp_path, FullDisk(tmp_path / "node-2"), 1)
        with pytest.raises(OSError, match="No space left"):
            full.fetch(digest, nbytes, wanted=lambda: True)
        (tmp_path / "head" / digest).write_bytes(b"WEIGHTS")  # what came from the head now would not be taken
        assert fetcher(head, tmp_path, BlobStore(tmp_path / "node-3"), 2).fetch(
            digest, nbytes, wanted=lambda: True
        )


def test_feeder_that_sends_a_blob_too_slowly_is_abandoned_for_the_head(
    head: SupervisorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(feeder_blobs, "STALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(feeder_blobs, "SLOWEST", 1e12)
    digest, nbytes = BlobStore(tmp_path / "head").put(b"weights" * 100)
    asked = threading.Event()

    def trickle(sock: socket.socket, answer: dict[str, Any]) -> None:
        asked.set()
        with sock, contextlib.suppress(OSError):
            sockets.send_message(sock, {"type": "blob", "digest": digest, "nbytes": nbytes})
            while True:
                sock.sendall(b"w")
                time.sleep(0.05)

    acceptor = Acceptor(
        "127.0.0.1", 0, key=KEY, job="job", facts={}, welcomed=trickle, versions=handshake.DATA
    )

    def serve() -> None:
        with contextlib.suppress(ValueError):  # it is closed at the end
            while True:
                acceptor.serve()
                time.sleep(0.01)

    threading.Thread(target=serve, daemon=True).start()
    first = fetcher(head, tmp_path, BlobStore(tmp_path / "node-1"), acceptor.port)
    assert first.fetch(digest, nbytes, wanted=lambda: True)
    await_nodes(head, digest, 1)
    second = fetcher(head, tmp_path, BlobStore(tmp_path / "node-2"), 1)
    assert second.fetch(digest, nbytes, wanted=lambda: True)
    assert asked.is_set()
    acceptor.close()


def test_blob_owned_by_another_user_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = BlobStore(tmp_path / "blobs")
    digest, nbytes = store.put(b"weights")

    def utime(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "utime", utime)
    here, there = socket.socketpair()
    with here, there:
        store.send(here, digest, nbytes)
        assert sockets.recv_message(there) == {"type": "blob", "digest": digest, "nbytes": nbytes}
        assert sockets.recv_exactly(there, nbytes) == b"weights"


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """This process has so many more of them open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2 * count), hard), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(count):
            stack.callback(os.close, os.dup(0))
        yield


def test_feeder_with_many_open_files_still_gets_blobs(head: SupervisorServer, tmp_path: Path):
    digest, nbytes = BlobStore(tmp_path / "head").put(b"weights")
    store = BlobStore(tmp_path / "node")
    with descriptors(1100):
        assert fetcher(head, tmp_path, store, 1).fetch(digest, nbytes, wanted=lambda: True)
    assert store.path(digest).read_bytes() == b"weights"


def fetcher(head: SupervisorServer, folder: Path, store: BlobStore, port: int) -> BlobFetcher:
    """Of a feeder that says it hands on at `port`."""
    settings = settings_in(folder, name="feeder-9", supervisor_host="127.0.0.1", supervisor_port=head.port)
    return BlobFetcher(settings, KEY, store, lambda: ("127.0.0.1", port))


def batch(head: SupervisorServer, feeder: Served, bundle: Bundle) -> list[int]:
    state: Any = head._state
    wait_until(lambda: feeder.port in state.link_keys, 10, "the feeder has reported")
    with Receiver(feeder.port, state.link_keys[feeder.port]) as receiver:
        receiver.ticket(0, [3, 4], receiver.know(bundle))
        found: list[int] = receiver.next().batch().tolist()
        return found


def test_node_gets_user_code_from_other_nodes_even_if_one_is_lost(head: SupervisorServer, tmp_path: Path):
    dataset = Squares()
    dataset.weights = torch.arange(1_000_000)  # type: ignore[attr-defined]
    bundle = bundle_of(dataset, tmp_path / "head")
    with ExitStack() as stack:
        first, second, third = (
            stack.enter_context(node(tmp_path / name, name, head))
            for name in ("feeder-0", "feeder-1", "feeder-2")
        )
        assert batch(head, first, bundle) == [9, 16]
        for digest, nbytes in bundle.blobs:  # what came from the head now would not be taken
            await_nodes(head, digest, 1)
            (tmp_path / "head" / digest).write_bytes(bytes(nbytes))
        assert batch(head, second, bundle) == [9, 16]
        for digest, _ in bundle.blobs:
            await_nodes(head, digest, 2)
        host().ask(type="kill", name="feeder-0")
        wait_until(lambda: not Path(f"/proc/{first.pid}").exists(), 5, "the first feeder is gone")
        assert batch(head, third, bundle) == [9, 16]
    for name in ("feeder-0", "feeder-1", "feeder-2"):
        kept = {path.name for path in blobs(tmp_path / name).iterdir() if not path.name.startswith(".")}
        assert kept == {digest for digest, _ in bundle.blobs}


def test_feeders_node_keeps_blobs_used_by_tickets_and_drops_the_rest(tmp_path: Path):
    settings = at_home(settings_in(tmp_path), tmp_path)
    store, machine, ready = BlobStore(Path(settings.blob_folder)), Feeding(2), list[bytes]()
    bundles = BundleStore(
        settings, KEY, machine, address=lambda: ("", 0), soon=lambda call: call(), here=ready.append,
        lost=lambda instructions, failure: None,
    )  # fmt: skip
    used, unused = (Bundle(blobs=(store.put(content),)) for content in (b"used", b"unused"))
    machine.opened(1)
    machine.ticket(1, stream=1, ticket=0, bundle=used.id, flags=0, room=0, payload=b"")
    bundles.learn(used.id, used.manifest())
    assert ready == [used.id]
    for bundle in (used, unused):
        os.utime(store.path(bundle.blobs[0][0]), (0, 0))
    bundles.keep(NODE_KEEP_S)
    assert not store.missing(used)
    assert store.missing(unused)
