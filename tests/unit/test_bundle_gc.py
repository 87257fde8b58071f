"""Blobs that no trainer uses any more are removed; the others, and fresh ones, stay."""

import os
from pathlib import Path

import pytest

from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.sidecar.supervisor_client import BundleGc


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


def bundle(store: BlobStore, content: bytes, *, loader: int = 0, epoch: int = 0) -> Bundle:
    return Bundle(blobs=(store.put(content),), loader=loader, epoch=epoch)


def age(store: BlobStore) -> None:
    for path in store.folder.iterdir():
        os.utime(path, (0, 0))


def here(store: BlobStore) -> int:
    return sum(1 for _ in store.folder.iterdir())


def test_dataset_that_changes_each_epoch_leaves_no_old_blobs(store: BlobStore):
    bundle_gc = BundleGc(store)
    for epoch in range(30):
        told = bundle(store, b"epoch %d" % epoch, epoch=epoch)
        bundle_gc.use(1, told)
        bundle_gc.released(1, told.id)
        age(store)
    bundle_gc.use(1, bundle(store, b"the last", epoch=30))
    assert here(store) <= 2


def test_blobs_of_a_live_stream_stay_although_its_loader_moved_on(store: BlobStore):
    bundle_gc = BundleGc(store)
    first, second = bundle(store, b"first"), bundle(store, b"second", epoch=1)
    bundle_gc.use(1, first)
    age(store)
    bundle_gc.use(1, second)
    assert store.missing(first) == []
    bundle_gc.released(1, first.id)
    age(store)
    bundle_gc.use(1, bundle(store, b"third", epoch=2))
    assert store.missing(first) != []


def test_blobs_that_a_loader_used_last_stay_for_its_next_epoch(store: BlobStore):
    bundle_gc = BundleGc(store)
    train, other = bundle(store, b"train", loader=0), bundle(store, b"validation", loader=1)
    bundle_gc.use(1, train)
    bundle_gc.released(1, train.id)
    age(store)
    bundle_gc.use(1, other)
    assert store.missing(train) == []


def test_blobs_released_by_one_trainer_stay_for_another(store: BlobStore):
    bundle_gc = BundleGc(store)
    shared = bundle(store, b"shared")
    bundle_gc.use(1, shared)
    bundle_gc.use(2, shared)
    bundle_gc.gone(1)
    age(store)
    bundle_gc.use(3, bundle(store, b"another"))
    assert store.missing(shared) == []


def test_trainer_has_time_to_reattach_after_its_receiver_ended(store: BlobStore):
    bundle_gc = BundleGc(store)
    mine = bundle(store, b"mine")
    bundle_gc.use(1, mine)
    age(store)
    bundle_gc.gone(1)
    bundle_gc.use(2, bundle(store, b"another"))
    assert store.missing(mine) == []


def test_restarted_sidecar_removes_nothing_at_once(store: BlobStore):
    mine = bundle(store, b"of a trainer that attaches again")
    age(store)
    BundleGc(store).use(1, bundle(store, b"another"))
    assert store.missing(mine) == []


def test_blob_written_or_requested_lately_stays(store: BlobStore):
    waiting = bundle(store, b"its bundle is on the way")
    age(store)
    bundle(store, b"its bundle is on the way")
    assert store.sweep(set(), 60.0) == 0
    assert store.missing(waiting) == []
