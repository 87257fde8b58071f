"""B10: the cost to a rank of drawing its indices: CPU, memory, and the time to resume in mid-epoch.

Indices are drawn in lists of 256, as torch's BatchSampler does. The first pass measures memory and time. The second
pass checks that no index occurs twice.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.meter import Meter

BATCH = 256
MOST = 10_000_000
"""Number of indices drawn from a larger epoch."""
SMOKE = 100_000
_PAGE_MB = 4096 / 1e6


@dataclass(frozen=True, slots=True)
class Case:
    samples: int
    smoke: bool = False

    @property
    def name(self) -> str:
        return f"{self.samples:,} samples"

    @property
    def size(self) -> int:
        """Length of the sampler's dataset."""
        return min(self.samples, SMOKE) if self.smoke else self.samples

    @property
    def drawn(self) -> int:
        """Number of indices drawn, at most MOST."""
        return min(self.size, MOST)


def measure(
    new_sampler: Callable[[int], Any], resume: Callable[[Any, int], Iterator[int]], case: Case
) -> dict[str, Any]:
    """Returns the figures. `new_sampler` makes a sampler for a number of samples; `resume` starts it at a position."""
    for _ in batches(iter(new_sampler(1000))):
        pass
    before_mb = _reset_peak_mb()
    meter = Meter()
    meter.start()
    for _ in itertools.islice(batches(iter(new_sampler(case.size))), case.drawn // BATCH):
        pass
    cpu_s, _ = meter.stop()
    peak_mb = _memory_mb("VmHWM") - before_mb
    began = time.perf_counter()
    first = next(resume(new_sampler(case.size), case.size // 2))
    resume_ms = 1e3 * (time.perf_counter() - began)
    figures = {
        "ns_per_index": 1e9 * cpu_s / (case.drawn // BATCH * BATCH),
        "peak_mb": max(peak_mb, _PAGE_MB),
        "resume_ms": resume_ms,
    }
    return {"figures": {case.name: figures}, "proof": _proof(new_sampler(case.size), first, case)}


def batches(indices: Iterator[int]) -> Iterator[list[int]]:
    """Yields the lists that BatchSampler makes from a sampler's iterator."""
    while batch := [*itertools.islice(indices, BATCH)]:
        yield batch


def _proof(sampler: Any, resumed: int, case: Case) -> dict[str, Any]:
    """Raises RuntimeError if an index occurs twice or is out of range, or if resuming returned another index."""
    half = case.size // 2
    found = np.fromiter(itertools.islice(iter(sampler), case.drawn), np.int64)
    if half < found.size and found[half] != resumed:
        raise RuntimeError(f"position {half} must have index {found[half]} after resuming, found {resumed}")
    found.sort()
    if (np.diff(found) == 0).any() or found[0] < 0 or found[-1] >= case.size:
        raise RuntimeError(f"each index below {case.size} may come once, found another or one twice")
    digest = hashlib.blake2b(found.tobytes(), digest_size=8).hexdigest()
    return {"batches": found.size // BATCH, "nbytes": found.nbytes, "digest": digest}


def _reset_peak_mb() -> float:
    """Resets the kernel's count of this process's peak. Returns the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_mb("VmRSS")


def _memory_mb(name: str) -> float:
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024 / 1e6
