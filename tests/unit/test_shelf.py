"""Blobs that no trainer uses any more are removed; the others, and fresh ones, stay."""

import os

from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.sidecar.shelf import MAX_BUNDLES, Shelf


def bundle(store: BlobStore, content: bytes) -> Bundle:
    return Bundle(blobs=(store.put(content),))


def age(store: BlobStore, told: Bundle) -> None:
    for digest, _ in told.blobs:
        os.utime(store.path(digest), (0, 0))


def test_a_dataset_that_changes_at_each_epoch_does_not_fill_the_disk(tmp_path):
    store = BlobStore(tmp_path)
    shelf = Shelf(store)
    for epoch in range(MAX_BUNDLES + 20):
        told = bundle(store, b"epoch %d" % epoch)
        assert shelf.use(told)
        age(store, told)
    assert sum(1 for p in tmp_path.iterdir() if not p.name.startswith(".")) <= MAX_BUNDLES + 1
    assert store.missing(told) == []


def test_a_blob_that_was_written_or_asked_for_lately_stays(tmp_path):
    store = BlobStore(tmp_path)
    waiting = bundle(store, b"its bundle is on the way")
    age(store, waiting)
    bundle(store, b"its bundle is on the way")
    assert store.sweep(set(), 60.0) == 0
    assert store.missing(waiting) == []


def test_a_bundle_told_again_is_not_new(tmp_path):
    store = BlobStore(tmp_path)
    shelf = Shelf(store)
    told = bundle(store, b"code")
    assert shelf.use(told)
    assert not shelf.use(told)
