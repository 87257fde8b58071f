"""The cost of a batch, measured in the watched process by making a few batches. Also a dry run of shipping the dataset
and code."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dataloaderjob.advise.source import Source
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.core.errors import InputError, UnsupportedBatch
from dataloaderjob.core.sizing import spread
from dataloaderjob.shipping.bundles import make_bundle

BATCHES, BUDGET_S = 16, 10.0
"""Maximum number of batches in the mean, and the time limit for them in seconds. At least three batches are made,
regardless of the limit."""
OUTLIER_OF = 8
"""The longest wait is left out of the mean if at least this many batches were made. A busy machine may have delayed
that batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The mean cost of a batch: its times in seconds, and its size."""

    fetch_cpu_s: float
    collate_cpu_s: float
    encode_cpu_s: float
    idle_s: float
    """Wall time minus CPU time: the time that the batch waited for storage."""
    nbytes: int
    spread: float
    """Coefficient of variation of a batch's wall time."""
    refused: str
    """The reason why a batch cannot be sent unchanged; empty if it can."""


@dataclass(slots=True)
class _Clock:
    """A clock for the CPU time and the wall time since the last lap. CPU time includes all threads of the process. Wall
    time excludes the time for which this thread waited for a CPU."""

    cpu: float = 0.0
    wall: float = 0.0

    def lap(self) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter() - _queued_s()
        passed = cpu - self.cpu, wall - self.wall
        self.cpu, self.wall = cpu, wall
        return passed


def _queued_s() -> float:
    """Returns the seconds for which this thread was runnable but waited for a CPU (schedstat in proc(5))."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def make(source: Source) -> Made:
    """Makes batches in this thread and returns their cost. As in a worker, torch uses one thread. Exceptions of user
    code are not caught.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(_samples(source), source)
    finally:
        torch.set_num_threads(threads)


def _samples(source: Source) -> Iterator[Callable[[], Any]]:
    """Yields a function for each batch, which fetches the batch's samples. For a map-style dataset, the sampler is
    iterated again to choose the batches."""
    dataset, is_batched = source.dataset, source.is_batched
    if isinstance(dataset, IterableDataset):
        stream, size = iter(dataset), source.batch_size or 1
        return itertools.repeat(lambda: list(itertools.islice(stream, size)) if is_batched else next(stream))
    if not is_batched:
        fetch = dataset.__getitem__
    else:
        fetch = getattr(dataset, "__getitems__", None) or (lambda keys: [dataset[key] for key in keys])
    return (partial(fetch, keys) for keys in source.index_sampler)


def _measured(samples: Iterator[Callable[[], Any]], source: Source) -> Made:
    rows: list[tuple[float, ...]] = []
    nbytes, refused, began = 0, "", time.perf_counter()
    for fetch in itertools.islice(samples, BATCHES + 1):
        clock = _Clock()
        clock.lap()
        try:
            fetched = fetch()
        except StopIteration:
            break
        if fetched == [] and source.is_batched:
            break
        got = clock.lap()
        batch = source.collate_fn(fetched)
        collated = clock.lap()
        size, why = _encode(batch)
        nbytes, refused = nbytes + size, refused or why
        rows.append((*got, *collated, *clock.lap()))
        if len(rows) > 2 and time.perf_counter() - began > BUDGET_S:
            break
    if not rows:
        raise InputError("the dataset yielded no sample when it was iterated again")
    return _costs(rows[1:] or rows, nbytes // len(rows), refused)  # the first batch includes opening files


def _costs(rows: Sequence[tuple[float, ...]], nbytes: int, refused: str) -> Made:
    """Returns the mean cost. `rows` has, for each batch, the CPU and wall times of fetch, collate and encode."""
    cpu_s, idle_s = ([sum(row[part::2]) for row in rows] for part in (0, 1))
    idle_s = sorted(max(0.0, wall - cpu) for wall, cpu in zip(idle_s, cpu_s, strict=True))
    if len(idle_s) >= OUTLIER_OF:
        idle_s.pop()
    fetch, collate, encode_ = (sum(row[part] for row in rows) / len(rows) for part in (0, 2, 4))
    return Made(
        fetch_cpu_s=fetch, collate_cpu_s=collate, encode_cpu_s=encode_,
        idle_s=sum(idle_s) / len(idle_s), nbytes=nbytes, spread=spread([row[1] + row[3] for row in rows]),
        refused=refused,
    )  # fmt: skip


def _encode(batch: Any) -> tuple[int, str]:
    """Encodes a batch as a feeder does. Returns a tuple: the batch's size in bytes, and the reason why it cannot be
    sent unchanged (empty if it can)."""
    refused = ""
    try:
        encoded = encode(batch, allow_pickle=False)
    except UnsupportedBatch as exc:
        refused = str(exc)
        try:
            encoded = encode(batch, allow_pickle=True)
        except UnsupportedBatch as worse:
            return 0, str(worse)
    shared = bytearray(encoded.nbytes)
    at = 0
    for part in encoded.buffers:
        shared[at : at + len(part)] = part
        at += len(part)
    return encoded.nbytes, refused


def shipping(source: Source) -> tuple[str, int]:
    """Packs the dataset and code into a temporary folder, as they would be packed for feeders. Returns a tuple: the
    reason why packing failed (empty if it succeeded), and the number of bytes packed."""
    with tempfile.TemporaryDirectory(prefix="dataloaderjob-") as folder:
        roots = source.dataset, source.collate_fn, source.worker_init_fn
        try:
            bundle = make_bundle(*roots, store=BlobStore(Path(folder)), allow_pickle=True)
        except InputError as exc:
            return str(exc), 0
        return "", sum(nbytes for _, nbytes in bundle.blobs)
