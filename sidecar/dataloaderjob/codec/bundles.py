"""User code and data on their way to feeders: dataset, collate_fn and worker_init_fn as a bundle of blobs.

`blobs[0]` is u64 length, a table, then the pickle (`module_state` tells its parts); `blobs[1]` the source of
the user's modules; the other blobs are the pickle's buffers, small ones several to a blob. A feeder maps
those privately: a node holds them once in memory, and each feeder may write to its own view of them.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dataloaderjob.codec import feeder_modules, process_state
from dataloaderjob.codec.facts import facts
from dataloaderjob.codec.feeder_modules import ModuleLoader
from dataloaderjob.codec.modules import Source
from dataloaderjob.codec.reducers import bytes_of
from dataloaderjob.codec.snapshot import Snapshot, Snapshots
from dataloaderjob.core import values
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.errors import InputError, RemoteProtocolError

BLOB_NBYTES = 64 * 1024 * 1024
"""Buffers are put together up to this size, for a dataset of 10,000 arrays is not to be 10,000 files."""
ALIGNMENT = 64
SLOW_S = 1.0
FIRST_BUFFER = 2
"""The blob behind the pickle and the sources."""
_LENGTH = struct.Struct("<Q")
Place = tuple[int, int, int]
"""(blob, offset, bytes) of a buffer."""
_snapshots = Snapshots()
_one_at_a_time = threading.RLock()
"""Threads that make iterators at the same time share what is known of earlier snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """What a bundle holds, loaded."""

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None


def make_bundle(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None,
    worker_init_fn: Callable[[int], None] | None,
    *,
    store: BlobStore,
    allow_pickle: bool,
    slow: Callable[[float], None] | None = None,
) -> Bundle:
    """Pickles what makes batches into `store`, as it is now; the bundle's id changes with its content.

    `slow` is called with the seconds that it took, if they are many and the next call will take as many.
    Raises InputError naming the attribute that cannot be pickled.
    """
    roots = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
    with _one_at_a_time, _no_collections():
        blobs = _snapshots.unchanged(roots, store)
        if blobs is None:
            began = time.perf_counter()
            snapshot = _snapshots.take(roots)
            blobs = _stored(snapshot, store)
            elapsed_s = time.perf_counter() - began
            if not _snapshots.remember(roots, snapshot, blobs, elapsed_s) and elapsed_s > SLOW_S and slow:
                slow(elapsed_s)
    return Bundle(blobs=blobs, allow_pickle=allow_pickle, facts=facts())


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """A collection over all that torch's import made takes 0.1 s, and pickling makes no garbage that needs one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _after_fork_in_child() -> None:
    global _one_at_a_time  # another thread may have held it
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _stored(snapshot: Snapshot, store: BlobStore) -> tuple[tuple[str, int], ...]:
    places: list[Place] = []
    groups = list(_groups(snapshot.buffers))
    for blob, group in enumerate(groups, start=FIRST_BUFFER):
        offset = 0
        for buffer in group:
            places.append((blob, offset, buffer.nbytes))
            offset += _padded(buffer.nbytes)
    table = values.pack((places, snapshot.process, snapshot.imports, snapshot.others))
    head = b"".join((_LENGTH.pack(len(table)), table, snapshot.pickled))
    own = [[memoryview(head)], [memoryview(snapshot.sources)]]
    made = [partial(_joined, group) for group in (*own, *groups)]
    return tuple(store.put_all(made) if len(groups) > 1 else [store.put(make()) for make in made])


def _groups(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Neighbours together, up to BLOB_NBYTES; a larger one by itself."""
    group: list[memoryview] = []
    nbytes = 0
    for buffer in buffers:
        if group and nbytes + buffer.nbytes > BLOB_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(buffer)
        nbytes += _padded(buffer.nbytes)
    if group:
        yield group


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _joined(group: list[memoryview]) -> bytes | memoryview:
    if len(group) == 1:
        return group[0]
    return b"".join(part for b in group for part in (b, bytes(_padded(b.nbytes) - b.nbytes)))


def load_bundle(bundle: Bundle, store: BlobStore) -> UserCode:
    """Loads what `make_bundle` stored into this process, which becomes what the trainer was; every blob has to
    be in `store`. Call once, in a process that has loaded nothing of the user's.

    Arrays and tensors of 64 KiB and more are views of the blobs: writable, private once written to.
    Raises InputError when a module of the user's code is missing here, naming it.
    """
    if len(bundle.blobs) < FIRST_BUFFER:
        raise RemoteProtocolError(f"a bundle needs {FIRST_BUFFER} blobs at least, found {len(bundle.blobs)}")
    head = store.path(bundle.blobs[0][0]).read_bytes()
    places, process, imports, others, start = _parse_head(head)
    main, sources = _parse_sources(store.path(bundle.blobs[1][0]).read_bytes())
    maps = [_map(store.path(digest), nbytes) for digest, nbytes in bundle.blobs[FIRST_BUFFER:]]
    try:
        buffers = [_part(maps[blob - FIRST_BUFFER], offset, nbytes) for blob, offset, nbytes in places]
    except (IndexError, TypeError, ValueError) as exc:
        raise RemoteProtocolError(f"a bundle's table of buffers is malformed: {exc}") from exc
    process_state.apply(process)
    feeder_modules.make_main(main)
    modules = ModuleLoader(sources, others)
    sys.meta_path.insert(0, modules)
    stream = io.BytesIO(head)
    stream.seek(start)
    try:
        dataset, collate_fn, worker_init_fn = modules.load(stream, buffers, imports)
    except Exception as exc:
        error = _explained(exc, modules)
        if error is None:
            raise
        raise error from exc
    return UserCode(dataset=dataset, collate_fn=collate_fn, worker_init_fn=worker_init_fn)


def _explained(exc: Exception, modules: ModuleLoader) -> InputError | None:
    if modules.failed:
        return next(iter(modules.failed.values()))
    if isinstance(exc, ModuleNotFoundError):
        return feeder_modules.missing(exc, "the dataset")
    if isinstance(exc, ImportError) or _lacks_in_module(exc):
        return InputError(
            f"the dataset cannot be loaded in a feeder: {exc}. Feeders seem to have another version of that "
            "module: install the trainer's"
        )
    if isinstance(exc, AttributeError):
        return InputError(
            f"the dataset cannot be loaded in a feeder: {exc}. A method of it, as __hash__, __eq__ or __setstate__, is "
            "called while it is unpickled and before the object's attributes are there. Objects that lead back to "
            "themselves through keys of a dictionary or members of a set cannot be copied so: keep a list there, or "
            "ids for keys, or make it in worker_init_fn"
        )
    if isinstance(exc, FileNotFoundError):
        return InputError(
            f"the dataset needs {exc.filename or exc!r}, which feeders do not see: mount the trainers' "
            "data volumes in the feeders' template, at the same path"
        )
    return None


def _lacks_in_module(exc: Exception) -> bool:
    """Whether an attribute of a module, or of a class, is missing; pickle and modules' __getattr__ raise their own."""
    return isinstance(exc, AttributeError) and (
        isinstance(exc.obj, ModuleType | type) or str(exc).startswith(("Can't get attribute", "module '"))
    )


def _parse_head(head: bytes) -> tuple[list[Place], bytes, list[tuple[str, bool]], dict[str, bytes], int]:
    if len(head) < _LENGTH.size:
        raise RemoteProtocolError(f"a bundle's first blob needs {_LENGTH.size} bytes, found {len(head)}")
    start = _LENGTH.size + _LENGTH.unpack_from(head)[0]
    match values.unpack(head[_LENGTH.size : start]):
        case (list() as places, bytes() as process, list() as imports, dict() as others):
            return places, process, imports, others, start
    raise RemoteProtocolError("a bundle's first blob holds no table of buffers")


def _parse_sources(data: bytes) -> tuple[Mapping[str, Any], dict[str, Source]]:
    match values.unpack(data):
        case (dict() as main, list() as packed):
            sources = (Source(name=n, file=f, search=s, text=t) for n, f, s, t in packed)
            return main, {source.name: source for source in sources}
    raise RemoteProtocolError("a bundle's second blob holds no modules")


def _map(path: Path, nbytes: int) -> memoryview:
    """The file, mapped privately. torch's mapping, unlike mmap's, keeps no descriptor open."""
    storage: Any = torch.UntypedStorage.from_file(str(path), False, nbytes)
    return bytes_of(storage).data


def _part(mapped: memoryview, offset: int, nbytes: int) -> memoryview:
    if not 0 <= offset <= offset + nbytes <= mapped.nbytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} of a blob of {mapped.nbytes}")
    return mapped[offset : offset + nbytes]
