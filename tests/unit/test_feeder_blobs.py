"""Feeders of several nodes get user code and data from the head and from one another: real processes, one machine."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from feeder_client import Receiver, Squares, bundle_of
from feeder_serving import KEY, Served, blobs, host, serving, settings_in

from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.feeder.blobs import BlobFetcher
from dataloaderjob.supervisor.server import SupervisorServer


class Heard:
    """What a supervisor's connections tell it, as far as feeders that fetch need an answer."""

    def feeder_ready(self, endpoint: Any) -> bool:
        return True

    def feeder_left(self, name: str, instance: str) -> None: ...


@pytest.fixture
def head(tmp_path: Path) -> SupervisorServer:
    state: Any = Heard()
    return SupervisorServer("127.0.0.1", 0, key=KEY, job="job", blob_folder=tmp_path / "head", state=state)


@contextmanager
def node(folder: Path, name: str, head: SupervisorServer) -> Iterator[Served]:
    folder.mkdir()
    with serving(folder, name, supervisor_host="127.0.0.1", supervisor_port=head.port) as served:
        yield served


class FullDisk(BlobStore):
    def write(self, digest: str, chunks: Iterable[bytes | memoryview], *, check: bool = True) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_node_whose_disk_is_full_blames_no_other_node(head: SupervisorServer, tmp_path: Path):
    digest, nbytes = BlobStore(tmp_path / "head").put(b"weights")
    with node(tmp_path / "feeder-0", "feeder-0", head) as first:
        fetcher(head, tmp_path, BlobStore(tmp_path / "node-1"), first.port).fetch(
            digest, nbytes, wanted=lambda: True
        )
        (blobs(tmp_path / "feeder-0") / digest).write_bytes(b"weights")
        full = fetcher(head, tmp_path, FullDisk(tmp_path / "node-2"), 1)
        with pytest.raises(OSError, match="No space left"):
            full.fetch(digest, nbytes, wanted=lambda: True)
        (tmp_path / "head" / digest).write_bytes(b"WEIGHTS")  # what came from the head now would not be taken
        assert fetcher(head, tmp_path, BlobStore(tmp_path / "node-3"), 2).fetch(
            digest, nbytes, wanted=lambda: True
        )


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


def test_a_feeder_that_has_many_files_open_gets_blobs_all_the_same(head: SupervisorServer, tmp_path: Path):
    digest, nbytes = BlobStore(tmp_path / "head").put(b"weights")
    store = BlobStore(tmp_path / "node")
    with descriptors(1100):
        assert fetcher(head, tmp_path, store, 1).fetch(digest, nbytes, wanted=lambda: True)
    assert store.path(digest).read_bytes() == b"weights"


def fetcher(head: SupervisorServer, folder: Path, store: BlobStore, port: int) -> BlobFetcher:
    """Of a feeder that says it hands on at `port`."""
    settings = settings_in(folder, name="feeder-9", supervisor_host="127.0.0.1", supervisor_port=head.port)
    return BlobFetcher(settings, KEY, store, lambda: ("127.0.0.1", port))


def batch(feeder: Served, bundle: Bundle) -> list[int]:
    with Receiver(feeder.port, KEY) as receiver:
        receiver.ticket(0, [3, 4], receiver.know(bundle))
        found: list[int] = receiver.next().batch().tolist()
        return found


def test_a_node_gets_user_code_from_another_node_and_from_the_next_if_that_is_gone(
    head: SupervisorServer, tmp_path: Path
):
    dataset = Squares()
    dataset.weights = torch.arange(1_000_000)  # type: ignore[attr-defined]
    bundle = bundle_of(dataset, tmp_path / "head")
    with ExitStack() as stack:
        first, second, third = (
            stack.enter_context(node(tmp_path / name, name, head))
            for name in ("feeder-0", "feeder-1", "feeder-2")
        )
        assert batch(first, bundle) == [9, 16]
        for digest, nbytes in bundle.blobs:  # what came from the head now would not be taken
            (tmp_path / "head" / digest).write_bytes(bytes(nbytes))
        assert batch(second, bundle) == [9, 16]
        host().ask(type="kill", name="feeder-0")
        assert batch(third, bundle) == [9, 16]
    for name in ("feeder-0", "feeder-1", "feeder-2"):
        kept = {path.name for path in blobs(tmp_path / name).iterdir() if not path.name.startswith(".")}
        assert kept == {digest for digest, _ in bundle.blobs}
