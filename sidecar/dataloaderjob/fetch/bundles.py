"""User code and data on their way to feeders: dataset, collate_fn and worker_init_fn as a bundle of blobs.

`blobs[0]` is u64 length, a table, then the pickle; the other blobs are its buffers, small ones several to
a blob. A feeder maps those privately: a node holds them once in memory, and each feeder may write to its
own view of them.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dataloaderjob.core import values
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.errors import InputError, RemoteProtocolError
from dataloaderjob.fetch import culprit
from dataloaderjob.fetch.facts import facts
from dataloaderjob.fetch.pickling import UserCodePickler, bytes_of, modules_by_value, script_folder

BLOB_NBYTES = 64 * 1024 * 1024
"""Buffers are put together up to this size, for a dataset of 10,000 arrays is not to be 10,000 files."""
ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
Place = tuple[int, int, int]
"""(blob, offset, bytes) of a buffer; blob 1 is the first behind the pickle."""


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
) -> Bundle:
    """Pickles what makes batches into `store`, as it is now; the bundle's id changes with its content.

    Raises InputError naming the attribute that cannot be pickled.
    """
    out, buffers = io.BytesIO(), list[memoryview]()
    folder = script_folder()
    with modules_by_value(folder):
        try:
            UserCodePickler(out, buffers.append).dump((dataset, collate_fn, worker_init_fn))
        except Exception as exc:  # whatever a __reduce__ of the user raises
            roots = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
            raise InputError(
                f"feeders need a copy of the dataset and its functions, and this cannot be copied: "
                f"{culprit.find(roots)}. Make it in worker_init_fn or when __getitem__ first needs it, "
                "or leave it out in __getstate__"
            ) from exc
    places: list[Place] = []
    blobs: list[tuple[str, int]] = []
    for group in _groups(buffers):
        offset = 0
        for buffer in group:
            places.append((len(blobs) + 1, offset, buffer.nbytes))
            offset += _padded(buffer.nbytes)
        blobs.append(store.put(group[0] if len(group) == 1 else _joined(group)))
    table = values.pack((places, str(folder)))
    head = store.put(b"".join((_LENGTH.pack(len(table)), table, out.getbuffer())))
    return Bundle(blobs=(head, *blobs), allow_pickle=allow_pickle, facts=facts())


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


def _joined(group: list[memoryview]) -> bytes:
    return b"".join(part for b in group for part in (b, bytes(_padded(b.nbytes) - b.nbytes)))


def load_bundle(bundle: Bundle, store: BlobStore) -> UserCode:
    """Loads what `make_bundle` stored; every blob has to be in `store`.

    Arrays and tensors of 64 KiB and more are views of the blobs: writable, private once written to.
    Raises InputError when a module of the user's code is missing here, naming it.
    """
    head = store.path(bundle.blobs[0][0]).read_bytes()
    places, folder, start = _parse_head(head)
    maps = [_map(store.path(digest), nbytes) for digest, nbytes in bundle.blobs[1:]]
    try:
        buffers = [_part(maps[blob - 1], offset, nbytes) for blob, offset, nbytes in places]
    except (IndexError, TypeError, ValueError) as exc:
        raise RemoteProtocolError(f"a bundle's table of buffers is malformed: {exc}") from exc
    # For modules that user code imports while it runs; on the same machine, or at the same mount point.
    if folder not in sys.path and os.path.isdir(folder):
        sys.path.append(folder)
    try:
        loaded = pickle.loads(memoryview(head)[start:], buffers=buffers)  # noqa: S301  authenticated
    except ModuleNotFoundError as exc:
        raise InputError(
            f"the dataset needs the module {exc.name!r}, which feeders do not have: install it in the "
            "feeders' image (the trainer's image plus dataloaderjob[feeder]), or put it into the folder of "
            "the training script, whose modules travel along"
        ) from exc
    except (ImportError, AttributeError) as exc:
        raise InputError(
            f"the dataset cannot be loaded in a feeder: {exc}. Feeders seem to have another version of that "
            "module: install the trainer's, or put it into the folder of the training script"
        ) from exc
    except FileNotFoundError as exc:
        raise InputError(
            f"the dataset needs {exc.filename or exc!r}, which feeders do not see: mount the trainers' "
            "data volumes in the feeders' template, at the same path"
        ) from exc
    dataset, collate_fn, worker_init_fn = loaded
    return UserCode(dataset=dataset, collate_fn=collate_fn, worker_init_fn=worker_init_fn)


def _parse_head(head: bytes) -> tuple[list[Place], str, int]:
    if len(head) < _LENGTH.size:
        raise RemoteProtocolError(f"a bundle's first blob needs {_LENGTH.size} bytes, found {len(head)}")
    start = _LENGTH.size + _LENGTH.unpack_from(head)[0]
    table = values.unpack(head[_LENGTH.size : start])
    if type(table) is not tuple or len(table) != 2 or type(table[0]) is not list or type(table[1]) is not str:
        raise RemoteProtocolError("a bundle's first blob holds no table of buffers")
    return table[0], table[1], start


def _map(path: Path, nbytes: int) -> memoryview:
    """The file, mapped privately. torch's mapping, unlike mmap's, keeps no descriptor open."""
    storage: Any = torch.UntypedStorage.from_file(str(path), False, nbytes)
    return bytes_of(storage).data


def _part(mapped: memoryview, offset: int, nbytes: int) -> memoryview:
    if not 0 <= offset <= offset + nbytes <= mapped.nbytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} of a blob of {mapped.nbytes}")
    return mapped[offset : offset + nbytes]
