"""The times of batches that builders on one machine have made: the layout of a builder's file, and sums over files.

A builder (`feeder.timing`) maps a file of fixed size in the folder TIMES next to its blobs, if that folder exists. A
builder that is killed leaves its file behind. `local.reporting` adds up the files.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

TIMES = "times"
"""Name of the folder, next to the folder of blobs."""
SUFFIX = ".times"
SLOWEST = 20
"""Number of slowest batches, and of slowest samples, that are kept individually."""
BUCKETS, PER_OCTAVE = 128, 4
"""Buckets of the histogram: bucket i begins at 2 ** (i / PER_OCTAVE) µs."""
MOST_FILES = 256
"""Maximum number of builders whose files are kept. If nobody adds the files up, as on a cluster, the oldest are
removed."""
MAGIC = b"DLJTIM01"
HEAD = struct.Struct("<8sQ")
"""The magic number and the builder's pid."""
SUMS = struct.Struct("<11Qd")
"""The fields of `Sums`, in the same order."""
BUCKET = struct.Struct("<Q")
ENTRY = struct.Struct("<4Qq120s")
"""The fields of `Entry`, in the same order."""
TEXT_NBYTES = 120
SUMS_AT = HEAD.size
BUCKETS_AT = SUMS_AT + SUMS.size
BATCHES_AT = BUCKETS_AT + BUCKETS * BUCKET.size
SAMPLES_AT = BATCHES_AT + SLOWEST * ENTRY.size
NBYTES = SAMPLES_AT + SLOWEST * ENTRY.size
_NAME = re.compile(r"(?P<feeder>[A-Za-z0-9._-]{1,64})\.(?P<pid>\d{1,10})" + re.escape(SUFFIX))


class Entry(NamedTuple):
    """One slow batch or sample. Times are in nanoseconds."""

    took_ns: int
    at_ns: int
    """Unix time at which the batch or sample was finished."""
    ticket: int
    """Number of the batch in its epoch, or in its slot."""
    sample_ns: int
    """Time of a batch's slowest sample, or 0 if the entry is a sample."""
    slot: int
    """Slot of an iterable dataset, or -1 for a map-style one."""
    text: str
    """Name of the sample, or of the batch's slowest sample."""


@dataclass(slots=True)
class Sums:
    """Counts and sums over batches. Times are in nanoseconds of wall time, unless their names say otherwise."""

    count: int = 0
    failed: int = 0
    nbytes: int = 0
    samples: int = 0
    wall_ns: int = 0
    cpu_ns: int = 0
    queued_ns: int = 0
    """Time for which a builder was ready to run and waited for a CPU."""
    fetch_ns: int = 0
    collate_ns: int = 0
    encode_ns: int = 0
    slots: int = 0
    """Highest number of slots of an iterable dataset."""
    squares: float = 0.0
    """Sum of the squares of wall times, in s²."""

    def add(self, other: Sums) -> None:
        for name in Sums.__slots__:
            if name != "slots":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slots = max(self.slots, other.slots)

    def pack_into(self, buffer: Any, at: int) -> None:
        SUMS.pack_into(
            buffer, at, self.count, self.failed, self.nbytes, self.samples, self.wall_ns, self.cpu_ns, self.queued_ns,
            self.fetch_ns, self.collate_ns, self.encode_ns, self.slots, self.squares,
        )  # fmt: skip

    @property
    def spread(self) -> float:
        """Coefficient of variation of a batch's wall time, or 0 for fewer than two batches."""
        if self.count < 2 or not self.wall_ns:
            return 0.0
        mean = self.wall_ns / 1e9 / self.count
        return math.sqrt(max(0.0, self.squares / self.count - mean * mean)) / mean


@dataclass(slots=True)
class Times:
    """Times of the batches of one builder, or of many."""

    sums: Sums = field(default_factory=Sums)
    buckets: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    batches: list[Entry] = field(default_factory=list)
    """The slowest batches, slowest first."""
    samples: list[Entry] = field(default_factory=list)

    def add(self, other: Times) -> None:
        self.sums.add(other.sums)
        self.buckets = [a + b for a, b in zip(self.buckets, other.buckets, strict=True)]
        self.batches = slowest((*self.batches, *other.batches))
        self.samples = slowest((*self.samples, *other.samples))

    def longest_of(self, batches: int) -> float:
        """Returns the expected time, in seconds, of the slowest among `batches` batches, or 0 if no batch was made."""
        total, below, found = sum(self.buckets), 0, 0.0
        for number, count in enumerate(self.buckets):
            if count:
                share, upto = (below / total) ** batches, ((below + count) / total) ** batches
                found += begin_of(number + 0.5) * (upto - share)
                below += count
        return found

    def quantile(self, share: float) -> float | None:
        """Returns the time, in seconds, within which this share of batches was made, accurate to about 10%. Returns
        None if there are no batches."""
        left = share * sum(self.buckets)
        if not any(self.buckets):
            return None
        for number, count in enumerate(self.buckets):
            left -= count
            if count and left <= 0:
                return begin_of(number + 0.5)
        return None


def packed(times: Times) -> dict[str, Any]:
    """Returns times as JSON-serializable values."""
    return {
        "sums": {name: getattr(times.sums, name) for name in times.sums.__slots__},
        "buckets": times.buckets,
        "batches": [list(entry) for entry in times.batches],
        "samples": [list(entry) for entry in times.samples],
    }


def unpacked(found: Mapping[str, Any]) -> Times:
    """Returns the times from the output of `packed`. Raises ValueError, TypeError or KeyError for anything else."""
    counts = {str(name): int(n) for name, n in found["sums"].items() if name != "squares"}
    sums = Sums(**counts)
    sums.squares = float(found["sums"]["squares"])
    buckets = [int(n) for n in found["buckets"]]
    if len(buckets) != BUCKETS:
        raise ValueError(f"expected {BUCKETS} buckets, got {len(buckets)}")

    def entries(rows: Any) -> list[Entry]:
        return slowest(
            Entry(int(took), int(at_ns), int(ticket), int(sample_ns), int(slot), str(text))
            for took, at_ns, ticket, sample_ns, slot, text in rows
        )

    return Times(sums, buckets, entries(found["batches"]), entries(found["samples"]))


def slowest(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: -entry.took_ns)[:SLOWEST]


def bucket_of(ns: int) -> int:
    return 0 if ns <= 1000 else min(BUCKETS - 1, int(PER_OCTAVE * math.log2(ns / 1000)))


def begin_of(bucket: float) -> float:
    """Returns the shortest time in a bucket, in seconds."""
    return float(2.0 ** (bucket / PER_OCTAVE) * 1e-6)


def path_of(folder: Path, feeder: str, pid: int) -> Path:
    return folder / f"{feeder}.{pid}{SUFFIX}"


def files(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yields the builders' files in a folder: (feeder, pid, path)."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if (match := _NAME.fullmatch(name)) is not None:
                yield match["feeder"], int(match["pid"]), folder / name


def prune(folder: Path) -> None:
    """Removes the oldest files of a folder until the folder has room for one more. Raises OSError."""
    found = [path for _, _, path in files(folder)]
    for path in sorted(found, key=lambda path: path.stat().st_mtime)[: max(0, len(found) - MOST_FILES + 1)]:
        path.unlink(missing_ok=True)


def read(path: Path) -> Times | None:
    """Reads a builder's file, which the builder may be changing. Returns None if it is not a builder's file."""
    try:
        with path.open("rb") as file:
            data = file.read(NBYTES)
    except OSError:
        return None
    if len(data) != NBYTES or HEAD.unpack_from(data)[0] != MAGIC:
        return None
    return Times(
        Sums(*SUMS.unpack_from(data, SUMS_AT)),
        [BUCKET.unpack_from(data, BUCKETS_AT + i * BUCKET.size)[0] for i in range(BUCKETS)],
        _entries(data, BATCHES_AT),
        _entries(data, SAMPLES_AT),
    )


def _entries(data: bytes, at: int) -> list[Entry]:
    rows = (ENTRY.unpack_from(data, at + i * ENTRY.size) for i in range(SLOWEST))
    return slowest(
        Entry(took, at_ns, ticket, sample_ns, slot, text.rstrip(b"\0").decode(errors="replace"))
        for took, at_ns, ticket, sample_ns, slot, text in rows
        if took
    )
