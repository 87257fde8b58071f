"""Blobs that no trainer uses any more are removed; the others, and fresh ones, stay."""

import os

from dataloaderjob.core.blobs import BlobStore, Spec
from dataloaderjob.sidecar.shelf import MAX_SPECS, Shelf


def spec(store: BlobStore, content: bytes) -> Spec:
    return Spec(blobs=(store.put(content),))


def age(store: BlobStore, told: Spec) -> None:
    for digest, _ in told.blobs:
        os.utime(store.path(digest), (0, 0))


def test_a_dataset_that_changes_at_each_epoch_does_not_fill_the_disk(tmp_path):
    store = BlobStore(tmp_path)
    shelf = Shelf(store)
    for epoch in range(MAX_SPECS + 20):
        told = spec(store, b"epoch %d" % epoch)
        assert shelf.use(told)
        age(store, told)
    assert sum(1 for p in tmp_path.iterdir() if not p.name.startswith(".")) <= MAX_SPECS + 1
    assert store.missing(told) == []


def test_a_blob_that_was_written_or_asked_for_lately_stays(tmp_path):
    store = BlobStore(tmp_path)
    waiting = spec(store, b"its spec is on the way")
    age(store, waiting)
    spec(store, b"its spec is on the way")
    assert store.sweep(set(), 60.0) == 0
    assert store.missing(waiting) == []


def test_a_spec_told_again_is_not_new(tmp_path):
    store = BlobStore(tmp_path)
    shelf = Shelf(store)
    told = spec(store, b"code")
    assert shelf.use(told)
    assert not shelf.use(told)
