"""Measurements of the batches that a builder makes, in a file that outlives the builder (`core.timings`).

Measuring takes 7 µs per batch and 0.1 µs per sample. If the folder for these files does not exist, nothing is measured.
"""

from __future__ import annotations

import contextlib
import mmap
import operator
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dataloaderjob.core import ticket_codec, timings
from dataloaderjob.core.costs import QueuedTime
from dataloaderjob.core.timings import ENTRY, SLOWEST, Sums

_TEXT_CHARS = 60
_perf, _cpu, _now = time.perf_counter_ns, time.process_time_ns, time.time_ns  # user code may patch the module
OnSample = Callable[[int], None]


class NoClock:
    """A clock that measures nothing."""

    keys: Sequence[Any] = ()
    """Keys of the batch that is being made."""

    def begin(self) -> None:
        """Marks the start of a batch."""

    def watching(self, on_sample: OnSample) -> OnSample:
        """Returns a callback that times samples and calls `on_sample`."""
        return on_sample

    def fetched(self) -> None:
        """Marks the end of the last sample and the start of collate_fn."""

    def made(self) -> None:
        """Marks the end of collate_fn and the start of encoding."""

    def end(self, ticket: int, payload: bytes, nbytes: int | None) -> None:
        """Marks the end of a batch, which is now in shared memory. `nbytes`: its size; None if user code failed.
        `payload`: its ticket."""


def open_clock(folder: Path | None, feeder: str, queued_time: QueuedTime, *, by_sample: bool) -> NoClock:
    """Returns a clock that writes to a new file for this process. If the folder does not exist, or the file cannot be
    created, returns a clock that measures nothing. `by_sample`: samples are made one by one."""
    if folder is None or not folder.is_dir():
        return NoClock()
    with contextlib.suppress(OSError, ValueError):
        timings.prune(folder)
        path = timings.path_of(folder, feeder, os.getpid())
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, timings.NBYTES)  # a full disk causes an error now, not SIGBUS later
            file = mmap.mmap(fd, timings.NBYTES)
        finally:
            os.close(fd)
        timings.HEAD.pack_into(file, 0, timings.MAGIC, os.getpid())
        return BatchClock(file, queued_time, by_sample=by_sample)
    return NoClock()


class BatchClock(NoClock):
    """The clock of one builder's batches."""

    def __init__(self, file: mmap.mmap, queued_time: QueuedTime, *, by_sample: bool) -> None:
        self._file, self._by_sample = file, by_sample
        self._sums = Sums()
        self._buckets = [0] * timings.BUCKETS
        self._slow = ([0] * SLOWEST, [0] * SLOWEST)
        """Times of the slowest batches and samples, by their places in the file."""
        self._queued_time = queued_time
        self._began = self._cpu = self._queued = self._fetched = self._made = 0
        self._starts: list[int] = []
        """Times at which the batch's samples began."""
        self._worst, self._worst_position = 0, -1

    def begin(self) -> None:
        self.keys = ()
        self._starts.clear()
        self._worst, self._worst_position = 0, -1
        self._fetched = self._made = 0
        self._queued, self._cpu = self._queued_time.ns(), _cpu()
        self._began = _perf()

    def watching(self, on_sample: OnSample) -> OnSample:
        if not self._by_sample:
            return on_sample

        starts = self._starts

        def sample(position: int) -> None:
            if not position:
                starts.clear()  # left by a batch that was rebuilt or tried
            starts.append(_perf())
            on_sample(position)

        return sample

    def fetched(self) -> None:
        self._fetched = now = _perf()
        if starts := self._starts:
            took = list(map(operator.sub, [*starts[1:], now], starts))
            self._worst = max(took)
            self._worst_position = took.index(self._worst)

    def made(self) -> None:
        self._made = _perf()

    def end(self, ticket: int, payload: bytes, nbytes: int | None) -> None:
        now, sums = _perf(), self._sums
        if nbytes is None:
            sums.failed += 1
            sums.pack_into(self._file, timings.SUMS_AT)
            return
        took, slot = now - self._began, ticket_codec.slot_of(payload)
        made = self._made or now
        fetched = self._fetched or made
        sums.count += 1
        sums.nbytes += nbytes
        sums.samples += len(self._starts)
        sums.wall_ns += took
        sums.cpu_ns += _cpu() - self._cpu
        sums.queued_ns += min(took, max(0, self._queued_time.ns() - self._queued))
        sums.fetch_ns += fetched - self._began
        sums.collate_ns += made - fetched
        sums.encode_ns += now - made
        sums.squares += (took / 1e9) ** 2
        if slot is not None:
            sums.slots = max(sums.slots, slot + 1)
        sums.pack_into(self._file, timings.SUMS_AT)
        bucket = timings.bucket_of(took)
        self._buckets[bucket] += 1
        timings.BUCKET.pack_into(
            self._file, timings.BUCKETS_AT + bucket * timings.BUCKET.size, self._buckets[bucket]
        )
        self._keep(0, timings.BATCHES_AT, took, ticket, slot, payload)
        if self._worst_position >= 0:
            self._keep(1, timings.SAMPLES_AT, self._worst, ticket, slot, payload)

    def _keep(self, which: int, at: int, took: int, ticket: int, slot: int | None, payload: bytes) -> None:
        """Writes an entry if it is among the slowest."""
        kept = self._slow[which]
        least = min(kept)
        if took <= least:
            return
        place = kept.index(least)
        kept[place] = took
        text = _describe(self.keys, payload, self._worst_position)[:_TEXT_CHARS].encode(errors="replace")
        of_slot = -1 if slot is None else slot
        ENTRY.pack_into(
            self._file, at + place * ENTRY.size, took, _now(), ticket, self._worst, of_slot,
            text[: timings.TEXT_NBYTES],
        )  # fmt: skip


def _describe(keys: Sequence[Any], payload: bytes, position: int) -> str:
    """Names a sample or, without a position, a batch's samples. Calls no user code."""
    if 0 <= position < len(keys):
        key = keys[position]
        parts = key if type(key) is tuple else (key,)
        if all(type(part) in (str, int) for part in parts):
            return f"index {key}" if type(key) is int else f"key {key!r}"
    return ticket_codec.describe_keys(payload, None if position < 0 else position)
