"""The cost of making batches. A builder measures each batch, and its feeder reports only the sums."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

_COST = struct.Struct("<5Q")
COUNTERS = (
    "built", "samples_ns", "collate_ns", "encode_ns", "wall_ns", "queued_ns", "wall_us2", "looks", "sending",
)  # fmt: skip
"""A feeder's sums since it started. `wall_us2` is a sum of squared microseconds, for the variance of `wall_ns`. `looks`
counts checks of the connection. `sending` counts those that found a finished batch waiting for it."""
SLOTS = "slots"
"""Key of the number of slots of iterable datasets that the feeder is reading now. It is the only value in a report that
is not a sum."""
_LARGEST = 1 << 96
QUEUED_EVERY_NS = 200_000_000
"""Nanoseconds between two readings of the scheduler's figures. A reading takes 1.2 µs."""


class BatchCost(NamedTuple):
    """The cost of one batch, in nanoseconds: CPU time by part, and wall time."""

    samples: int
    collate: int
    encode: int
    """CPU time to encode the batch and to copy it into shared memory."""
    wall: int
    queued: int = 0
    """Time during which the builder was ready to run but had no CPU, since the previous reading."""

    def pack(self) -> bytes:
        return _COST.pack(*self)

    @staticmethod
    def unpack(data: bytes, offset: int) -> BatchCost | None:
        """Returns the cost at `offset`, or None if `data` is too short to contain one."""
        return BatchCost(*_COST.unpack_from(data, offset)) if len(data) >= offset + _COST.size else None


class QueuedTime:
    """The time for which this process's main thread was ready to run but waited for a CPU (proc(5), schedstat)."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd: int | None = None
        """File descriptor of schedstat. None if the kernel does not measure this time, or if user code has closed the
        file."""
        with contextlib.suppress(OSError):
            self.fd = os.open(f"/proc/{os.getpid()}/task/{os.getpid()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def ns(self) -> int:
        """Returns the nanoseconds for which the thread has waited since it started, or 0 if they are unknown."""
        if self.fd is None:
            return 0
        try:
            return int(os.pread(self.fd, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):  # the descriptor may refer to another file by now
            self.fd = None
            return 0


class CostClock:
    """A clock that measures one batch at a time. A reading takes 0.2 to 0.4 µs."""

    __slots__ = ("_collate", "_encode", "_queued", "_queued_at", "_queued_time", "_start", "_wall")

    def __init__(self, queued_time: QueuedTime) -> None:
        self._queued_time = queued_time
        self._queued, self._queued_at = queued_time.ns(), time.perf_counter_ns()
        self.begin()

    def begin(self) -> None:
        """Marks the start of a batch, and of its samples."""
        self._wall = time.perf_counter_ns()
        self._start = self._collate = self._encode = time.process_time_ns()

    def collate(self) -> None:
        """Marks the end of the samples and the start of collate_fn."""
        self._collate = self._encode = time.process_time_ns()

    def encode(self) -> None:
        """Marks the end of collate_fn and the start of encoding."""
        self._encode = time.process_time_ns()
        if self._collate == self._start:  # the maker does not separate samples from collate_fn
            self._collate = self._encode

    def end(self) -> BatchCost:
        cpu, now, queued = time.process_time_ns(), time.perf_counter_ns(), 0
        if now - self._queued_at >= QUEUED_EVERY_NS:
            before, self._queued, self._queued_at = self._queued, self._queued_time.ns(), now
            queued = max(0, self._queued - before)
        return BatchCost(
            self._collate - self._start,
            self._encode - self._collate,
            cpu - self._encode,
            now - self._wall,
            queued,
        )


class FeederCosts:
    """The summed costs of one feeder."""

    __slots__ = ("_sums", "slots")

    def __init__(self) -> None:
        self._sums = dict.fromkeys(COUNTERS, 0)
        self.slots = 0

    def add(self, cost: BatchCost) -> None:
        sums = self._sums
        sums["built"] += 1
        sums["samples_ns"] += cost.samples
        sums["collate_ns"] += cost.collate
        sums["encode_ns"] += cost.encode
        sums["wall_ns"] += cost.wall
        sums["queued_ns"] += cost.queued
        sums["wall_us2"] += (cost.wall // 1000) ** 2

    def look(self, *, sending: bool) -> None:
        """Records whether a finished batch is waiting for the connection at this moment."""
        self._sums["looks"] += 1
        self._sums["sending"] += sending

    def report(self) -> dict[str, int]:
        return {**self._sums, SLOTS: self.slots}


def parse(found: object) -> dict[str, int]:
    """Parses a report from a feeder. Any value that is not a count becomes 0."""
    values = found if isinstance(found, Mapping) else {}
    return {name: _count(values.get(name)) for name in (*COUNTERS, SLOTS)}


def _count(found: object) -> int:
    return found if type(found) is int and 0 <= found < _LARGEST else 0
