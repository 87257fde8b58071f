"""B3: dataset to trainer, with a trainer that sleeps instead of computing (as MLPerf Storage does).

A cell has three phases on one iterator: warm-up; flat out, which gives the rate of this loader; and paced, with a sleep
of 1 / (0.9 x that rate) after each batch. Utilisation is the time of all steps over the wall time of the paced phase,
without its first step. CPU per GB is measured in the paced phase, over all processes that must be on the trainer's
node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench import machine
from bench.stats import percentile
from bench.work import Proof, sums

DEMAND = 0.9
SIDE = 224
_BASE_SIDE = 256
_CHECK_EVERY = 16


@dataclass(frozen=True, slots=True)
class Case:
    producers: int
    """Number of workers, feeders or actors."""
    flat_out_s: float
    paced_s: float
    batch: int = 64
    batches: int = 2000
    """Length of the dataset in batches; more than any cell takes."""
    smoke: bool = False

    @property
    def warm(self) -> int:
        return 4 if self.smoke else 16

    @property
    def name(self) -> str:
        return f"{self.producers} producer{'s' if self.producers > 1 else ''}"

    def images(self) -> Any:
        """Returns the dataset of a trainer's batches. Its `stacked` makes the expected contents."""
        return Images(self)


class Images(torch.utils.data.Dataset[Any]):
    """Stored pictures with a crop, flip and tone fixed by the index: about 2.5 CPU-s/GB, 3 with collate."""

    def __init__(self, case: Case) -> None:
        self._length = case.batch * case.batches
        rng = np.random.default_rng(7)
        # uint8, shape (pictures, channels, height, width)
        self._base = rng.integers(0, 256, (4, 3, _BASE_SIDE, _BASE_SIDE), dtype=np.uint8)
        self._tone = np.clip((np.arange(256) / 255.0) ** 0.8 * 255.0, 0, 255).astype(np.uint8)

    def __len__(self) -> int:
        return self._length

    def picture(self, index: int) -> np.ndarray:
        """Returns a picture, uint8 of shape (3, 224, 224)."""
        mixed = (index * 2_654_435_761) & 0xFFFF_FFFF
        y, x = mixed % 32, (mixed >> 8) % 32
        crop = self._base[(mixed >> 16) & 3, :, y : y + SIDE, x : x + SIDE]
        if (mixed >> 20) & 1:
            crop = crop[:, :, ::-1]
        return self._tone[crop]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.picture(index)), index

    def stacked(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns a whole batch as arrays, for peers that do not collate with torch: pictures and int64 indices."""
        return np.stack([self.picture(int(i)) for i in indices]), np.asarray(indices, dtype=np.int64)


def numbers_of(case: Case, batch: int) -> range:
    """Returns the indices of batch number `batch`."""
    return range(batch * case.batch, (batch + 1) * case.batch)


def every_so_many(before: int) -> int:
    """Returns the number of a batch to compare, for a single trainer that has all batches."""
    return before * _CHECK_EVERY


class _Taker:
    """Takes batches, checks the indices of each and the pictures of every 16th, and times the waits.

    The expected pictures are made here from the same dataset, before anything is measured. `share` maps the count of
    earlier batches to the number of the trainer's batch, and `checked` to the number of a batch to compare.
    """

    def __init__(
        self, stream: Iterator[Any], case: Case, share: Callable[[int], int], checked: Callable[[int], int]
    ) -> None:
        self._stream, self._case = stream, case
        dataset = case.images()
        self._share = share
        self.taken = 0
        self.proof = Proof()
        self.check_ns = 0
        self.arrived = 0.0
        """Arrival of the last batch, in perf_counter seconds. The trainer's step begins then."""
        numbers = map(checked, range(3 if case.smoke else 10))
        self._expected = {number: [sums(dataset.stacked(numbers_of(case, number))[0])] for number in numbers}

    def take(self) -> int:
        """Takes one batch. Returns the wait in nanoseconds, without the check that follows."""
        t0 = time.perf_counter_ns()
        pictures, indices = next(self._stream)
        self.arrived = time.perf_counter()
        waited = time.perf_counter_ns() - t0
        start = time.thread_time_ns()
        number = self._share(self.taken)
        expected = np.arange(number * self._case.batch, (number + 1) * self._case.batch)
        if not np.array_equal(np.asarray(indices), expected):
            raise RuntimeError(f"batch {number} holds the indices {np.asarray(indices)[:8]}...")
        if number in self._expected:
            self.proof.add(number, [np.asarray(pictures)], self._expected[number])
        self.taken += 1
        self.check_ns += time.thread_time_ns() - start
        return waited


def measure(
    stream: Iterator[Any],
    case: Case,
    *,
    node_pids: Callable[[], Iterable[int]],
    besides: Callable[[], Iterable[int]] = tuple,
    share: Callable[[int], int] = int,
    checked: Callable[[int], int] = every_so_many,
) -> dict[str, Any]:
    """Runs the three phases.

    `node_pids` returns the processes that must be on the trainer's node, and is called after the warm-up. `besides`
    returns processes that are on the node but could be elsewhere. `share` maps the count of earlier batches to the
    number of the trainer's batch. `checked` maps it to the number of a batch whose pictures are compared; these are
    the same for all parties.
    """
    taker = _Taker(stream, case, share, checked)
    for _ in range(case.warm):
        taker.take()
    start, first = time.perf_counter(), taker.taken
    while time.perf_counter() - start < case.flat_out_s:
        taker.take()
    rate = (taker.taken - first) / (time.perf_counter() - start)
    pids = sorted(set(node_pids()))
    paced = _paced(taker, case, step_s=1.0 / (DEMAND * rate), pids=pids, besides=sorted(set(besides())))
    figures = {"batches_per_s": rate, **paced}
    return {"figures": {case.name: figures}, "proof": taker.proof.as_json()}


def _paced(
    taker: _Taker, case: Case, *, step_s: float, pids: list[int], besides: list[int]
) -> dict[str, float]:
    taker.take()
    time.sleep(step_s)
    waits: list[int] = []
    computed = 0.0
    cpu, others, checks = machine.cpu_ns(pids), machine.cpu_ns(besides), taker.check_ns
    before = machine.snapshot()
    start = time.perf_counter()
    while time.perf_counter() - start < case.paced_s:
        waits.append(taker.take())
        # the check reads the batch, as a trainer's step would, so it is part of the step
        time.sleep(max(step_s - (time.perf_counter() - taker.arrived), 0.0))
        computed += time.perf_counter() - taker.arrived
    wall = time.perf_counter() - start
    cpu = machine.cpu_ns(pids) - cpu - (taker.check_ns - checks)
    others = machine.cpu_ns(besides) - others
    load = machine.between(before, machine.snapshot())
    nbytes = len(waits) * case.batch * 3 * SIDE * SIDE
    return {
        "utilisation": computed / wall,
        "node_cpu_s_per_gb": cpu / nbytes,
        "all_cpu_s_per_gb": (cpu + others) / nbytes,
        "node_ms_per_batch": cpu / 1e6 / len(waits),
        "wait_p50_us": percentile(waits, 0.5) / 1e3,
        "wait_p99_us": percentile(waits, 0.99) / 1e3,
        "demand_batches_per_s": 1.0 / step_s,
        "machine_busy_share": load.busy_share,
    }
