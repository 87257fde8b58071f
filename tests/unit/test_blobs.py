"""The folder of blobs: by content, whole or not at all, once."""

import hashlib
import os
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaderjob.core.blobs import NODE_KEEP_S, PART_KEEP_S, BlobStore, Bundle
from dataloaderjob.core.errors import InputError, RemoteProtocolError, ServiceUnavailable

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(
    blobs=st.lists(st.tuples(DIGESTS, st.integers(0, 2**40)), min_size=1, max_size=5),
    allow=st.booleans(),
    facts=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_manifest_round_trips_with_the_same_id(blobs, allow, facts):
    bundle = Bundle(blobs=tuple(blobs), allow_pickle=allow, facts=facts)
    again = Bundle.parse(bundle.manifest())
    assert again == bundle
    assert again.id == bundle.id


@given(st.binary(max_size=60))
def test_random_bytes_are_refused_as_a_manifest(data):
    with pytest.raises(RemoteProtocolError):
        Bundle.parse(data)


@pytest.mark.parametrize("digest", ["../../etc/passwd", "", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_malformed_digest_never_becomes_a_path(tmp_path, digest):
    with pytest.raises(RemoteProtocolError, match="is not a SHA-256"):
        BlobStore(tmp_path).path(digest)
    with pytest.raises(RemoteProtocolError):
        Bundle.parse(Bundle(blobs=((digest, 1),)).manifest())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(data=st.binary(max_size=1000))
def test_a_blob_is_found_by_its_content(tmp_path, data):
    store = BlobStore(tmp_path)
    digest, nbytes = store.put(data)
    assert store.path(digest).read_bytes() == data
    assert store.has(digest, nbytes)
    assert not store.has(digest, nbytes + 1)
    assert store.put(data) == (digest, nbytes)


def test_damaged_blob_leaves_no_file(tmp_path):
    store = BlobStore(tmp_path)
    digest, nbytes = BlobStore(tmp_path / "other").put(b"good")
    with pytest.raises(RemoteProtocolError, match="damaged"):
        store.write(digest, [b"bad!"])
    assert not store.has(digest, nbytes)
    assert [p for p in tmp_path.iterdir() if p.is_file()] == []


def test_broken_transfer_leaves_no_file(tmp_path):
    store = BlobStore(tmp_path)

    def broken():
        yield b"half"
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        store.write("0" * 64, broken())
    assert list(tmp_path.iterdir()) == []


def test_one_process_per_node_fetches_while_the_others_wait(tmp_path):
    store = BlobStore(tmp_path)
    order = []

    def second():
        with BlobStore(tmp_path).lock("0" * 64):
            order.append("second")

    thread = threading.Thread(target=second)
    with store.lock("0" * 64):
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_nodes_folder_keeps_used_blobs_and_drops_the_rest(tmp_path):
    store = BlobStore(tmp_path)
    used, unused = (Bundle(blobs=(store.put(content),)) for content in (b"used", b"unused"))
    for bundle in (used, unused):
        os.utime(store.path(bundle.blobs[0][0]), (0, 0))
    long_ago = time.time() - PART_KEEP_S
    for name, written_at in ((".part-left", long_ago - 60), (".part-growing", long_ago + 60)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (written_at, written_at))
    store.touch(used)
    assert store.sweep(set(), NODE_KEEP_S) == 2
    assert {path.name for path in tmp_path.iterdir()} == {used.blobs[0][0], ".part-growing"}
    assert store.missing(used) == []
    assert store.missing(unused) == list(unused.blobs)


def test_many_blobs_are_stored_in_the_order_they_were_given(tmp_path):
    store = BlobStore(tmp_path)
    contents = [bytes([i]) * (i * 100_000) for i in range(20)]
    stored = store.put_all([lambda content=content: content for content in contents])
    assert stored == [BlobStore(tmp_path / "other").put(content) for content in contents]
    assert [store.path(digest).read_bytes() for digest, _ in stored] == contents


def test_large_blobs_are_hashed_side_by_side(tmp_path, monkeypatch):
    both, sha256 = threading.Barrier(2, timeout=10), hashlib.sha256

    def hashed(*data):
        both.wait()
        return sha256(*data)

    store, contents = BlobStore(tmp_path), [b"a" * 1_000_000, b"b" * 1_000_000]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(hashlib, "sha256", hashed)
    stored = store.put_all([lambda content=content: content for content in contents])
    assert [digest for digest, _ in stored] == [sha256(content).hexdigest() for content in contents]


def test_blob_is_hashed_once_by_the_process_that_stores_it(tmp_path, monkeypatch):
    hashed = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda *data: hashed.append(data) or sha256(*data))
    BlobStore(tmp_path).put(b"content")
    assert len(hashed) == 1


def test_missing_blob_folder_is_reported_as_a_lost_service(tmp_path):
    store = BlobStore(tmp_path / "blobs")
    (tmp_path / "blobs").rmdir()
    with pytest.raises(ServiceUnavailable, match="its folder is gone"):
        store.put(b"data")


NARROW = {"spec.sidecar.scratch.size": 64 << 20, "spec.feeders.scratch.size": 1 << 20}


def test_data_too_large_for_scratch_are_refused_before_writing(tmp_path):
    store = BlobStore(tmp_path, NARROW)
    with pytest.raises(
        InputError, match=r"need 2 MiB, but scratch has 1 MiB: raise spec\.feeders\.scratch\.size"
    ):
        store.put(bytes(2 << 20))
    assert not list(tmp_path.iterdir())


def test_data_must_fit_next_to_stored_data(tmp_path):
    store = BlobStore(tmp_path, NARROW)
    store.put(b"a" * (900 << 10))
    store.put(b"a" * (900 << 10))  # it is there already
    with pytest.raises(InputError, match=r"need 0\.879 MiB in addition to 0\.879 MiB already stored"):
        store.put(b"b" * (900 << 10))
