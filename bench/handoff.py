"""B1: from a ready batch to torch tensors in the trainer. The measurement is the same for all parties.

The stream yields batch 0, 1, 2 ... of `ReadyBatches`. There are two ways to take them:

- ready: sleep until several are ready, take them in a burst, hold them, then release all;
- as they come: take each as soon as it arrives, and release it before the next.

The CPU covers next() and the release, in every thread of the process. It does not cover checks and the sleep. Then one
byte of each page of the burst's tensors is read. That CPU is a separate figure, because a loader that maps fresh memory
for each batch pays for it there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.meter import Meter
from bench.stats import percentile
from bench.work import KINDS, Contents, Proof

PAGE_NBYTES = 4096
MAX_REFILL_S = 0.25


@dataclass(frozen=True, slots=True)
class Case:
    nbytes: int
    tensors: int
    smoke: bool = False
    """True for a run of a few batches."""

    @property
    def burst(self) -> int:
        return 4 if self.nbytes > 4e6 else 16

    @property
    def bursts(self) -> int:
        if self.smoke:
            return 3
        return 10 if self.nbytes > 4e6 else 20

    @property
    def warm_bursts(self) -> int:
        return 1 if self.smoke else 3

    @property
    def window(self) -> int:
        """Number of batches that a loader may have ready: a burst and a half."""
        return self.burst + self.burst // 2

    @property
    def warm_batches(self) -> int:
        """Number of batches taken first. By then each place of a pool has been written."""
        return self.window if self.smoke else 2 * (self.window + self.burst)

    @property
    def taken(self) -> int:
        """Number of batches taken as they come."""
        if self.smoke:
            return 10
        return 100 if self.nbytes > 4e6 else 300

    @property
    def batches(self) -> int:
        """Number of batches for both ways, warm-up included."""
        return self.warm_batches + self.window + self.burst * (self.warm_bursts + self.bursts) + self.taken


class ReadyBatches(torch.utils.data.Dataset[Any]):
    """Whole batches: item i is one uint8 tensor, or a list of them, each stamped with i."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._contents: Contents | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"case": self.case, "_contents": None}

    def __len__(self) -> int:
        return self.case.batches

    def __getitem__(self, number: int) -> Any:
        parts = [torch.from_numpy(array) for array in self.arrays(number)]
        return parts[0] if self.case.tensors == 1 else parts

    def arrays(self, number: int) -> list[np.ndarray]:
        """Returns fresh arrays of batch `number`."""
        if self._contents is None:
            self._contents = Contents(self.case.nbytes, self.case.tensors)
        parts = [part.copy() for part in self._contents.parts[number % KINDS]]
        for part in parts:
            part[:8].view(np.uint64)[0] = number
        return parts


class Checker:
    """Verifies taken batches. It reads them outside the measured time."""

    def __init__(self, case: Case) -> None:
        self._contents = Contents(case.nbytes, case.tensors)
        self.proof = Proof()

    def full(self, number: int, batch: Any) -> None:
        arrays = [t.numpy() for t in tensors_of(batch)]
        self.proof.add(number, arrays, self._contents.expected(number, stamped=True))

    def stamp(self, number: int, batch: Any) -> None:
        found = int(tensors_of(batch)[0].numpy()[:8].view(np.uint64)[0])
        if found != number:
            raise RuntimeError(f"batch {number} was due, found batch {found}")


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return [batch] if isinstance(batch, torch.Tensor) else list(batch)


def measure(stream: Iterator[Any], case: Case) -> dict[str, Any]:
    """Takes `case.batches` batches. Returns the figures of both ways and the proof."""
    checker = Checker(case)
    produce_s, number = _produce_s(stream, checker, case.warm_batches, case.window)
    ready, number = _ready(
        stream, case, checker, number, refill_s=min(1.5 * produce_s * case.burst + 0.005, MAX_REFILL_S)
    )
    come = _as_they_come(stream, case, checker, number)
    name = case_name(case)
    return {
        "figures": {f"{name}, ready": ready, f"{name}, as they come": come},
        "proof": checker.proof.as_json(),
    }


def case_name(case: Case) -> str:
    return f"{case.nbytes / 1e6:.1f} MB, {case.tensors} tensor{'s' if case.tensors > 1 else ''}"


def _produce_s(stream: Iterator[Any], checker: Checker, warm: int, count: int) -> tuple[float, int]:
    """Returns the producer's seconds per batch, over `count` batches after `warm`."""
    for number in range(warm + count):
        if number == warm:
            start = time.perf_counter()
        checker.stamp(number, next(stream))
    return (time.perf_counter() - start) / count, warm + count


def _ready(
    stream: Iterator[Any], case: Case, checker: Checker, number: int, *, refill_s: float
) -> tuple[dict[str, float], int]:
    meter, touch_ns = Meter(), 0
    latencies: list[int] = []
    held: list[Any] = []
    for burst in range(case.warm_bursts + case.bursts):
        if burst == case.warm_bursts:
            latencies.clear()
            touch_ns = 0
            meter.start()
        if burst >= case.warm_bursts:
            meter.pause()
        time.sleep(refill_s)
        if burst >= case.warm_bursts:
            meter.resume()
        for _ in range(case.burst):
            t0 = time.perf_counter_ns()
            held.append(next(stream))
            latencies.append(time.perf_counter_ns() - t0)
        if burst >= case.warm_bursts:
            meter.pause()
        touch_ns += _touch_ns(held)
        for batch in held:
            checker.full(number, batch)
            number += 1
        del batch
        if burst >= case.warm_bursts:
            meter.resume()
        held.clear()
    cpu_s, _ = meter.stop()
    count = case.burst * case.bursts
    return {
        "cpu_us": 1e6 * cpu_s / count,
        "touched_us": 1e6 * cpu_s / count + touch_ns / 1e3 / count,
        **_latency(latencies),
    }, number


def _as_they_come(stream: Iterator[Any], case: Case, checker: Checker, number: int) -> dict[str, float]:
    """Measures the CPU of this thread within next() and the release, and of all other threads."""
    latencies: list[int] = []
    own_ns, now_ns = 0, time.thread_time_ns
    others_ns = time.process_time_ns() - now_ns()
    for i in range(case.taken):
        t0 = time.perf_counter_ns()
        began = now_ns()
        batch = next(stream)
        own_ns += now_ns() - began
        latencies.append(time.perf_counter_ns() - t0)
        if i % 8 == 0:
            checker.full(number + i, batch)
        else:
            checker.stamp(number + i, batch)
        began = now_ns()
        batch = None
        own_ns += now_ns() - began
    others_ns = time.process_time_ns() - now_ns() - others_ns
    return {"cpu_us": (own_ns + others_ns) / 1e3 / case.taken, **_latency(latencies)}


def _touch_ns(batches: list[Any]) -> int:
    """Measures the CPU of reading one byte of each page of these batches."""
    start = time.thread_time_ns()
    for batch in batches:
        for tensor in tensors_of(batch):
            tensor.numpy()[::PAGE_NBYTES].sum()
    return time.thread_time_ns() - start


def _latency(latencies_ns: list[int]) -> dict[str, float]:
    late = sum(1 for x in latencies_ns if x > 1_000_000)
    return {
        "p50_us": percentile(latencies_ns, 0.5) / 1e3,
        "p99_us": percentile(latencies_ns, 0.99) / 1e3,
        "over_1ms_share": late / len(latencies_ns),
    }
