"""The model behind the advice. From measured times, it derives a limit, a number of feeders, and a predicted rate.
Pure.

A pipeline has three parts. Its step is training without waiting. Its batches cost CPU and wall time. Its bytes cross a
link and a receiver. Each part bounds the rate, and the lowest bound is the limit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

WORTH = 0.05
"""Share of a step spent waiting below which there is nothing to gain."""
HEADROOM, MOST_SPREAD = 0.85, 0.10
"""Share of time for which a feeder is planned to be busy. MOST_SPREAD is the largest reduction of that share, for batch
times that vary."""
WAITS = 0.5
"""Share of a batch's wall time spent off the CPU, above which storage is the limit."""
LINK_USE = 0.9
"""Usable share of a link."""
WINDOW, WINDOW_PER_FEEDER = 16, 2
"""Default number of batches in flight for a rank: WINDOW, or WINDOW_PER_FEEDER for each feeder if that is more."""
RECEIVE_S_PER_GB = 0.3
"""CPU seconds that a receiver needs per GB: the floor of benchmark B2 in docs/benchmark-results.md."""
RECEIVE_S = 100e-6
"""CPU seconds that a receiver needs for a small batch (B2: 75 to 100 µs)."""


class Limit(StrEnum):
    """The resource that bounds the rate."""

    CPU = "cpu"
    """The processes that make batches have no more CPU."""
    STORAGE = "storage"
    SLOTS = "slots"
    """An iterable dataset has no more sources that can be read in parallel."""
    NETWORK = "network"
    RECEIVER = "receiver"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Measurements of one loader. Times are per batch of one rank, in seconds."""

    period_s: float
    """The time from one batch to the next, as observed."""
    step_s: float
    """The time from one batch to the next, without waiting for input."""
    cpu_s: float
    """CPU time to make a batch: samples, collate, encode."""
    wall_s: float
    """Wall time to make a batch in one process."""
    nbytes: int
    spread: float = 0.0
    """Coefficient of variation of `wall_s`."""
    longest_s: float = 0.0
    """Average wall time of the slowest batch of a window, or 0 if it is unknown."""
    ranks: int = 1
    slots: int | None = None
    """Sources of an iterable dataset that can be read in parallel. None if any number of feeders can share the work."""
    link: float | None = None
    """Bytes per second into the trainer's node. None if this is unknown, or on one machine."""

    def __post_init__(self) -> None:
        """Raises ValueError for a negative figure, or for a period or a wall time of 0."""
        if not (
            self.period_s > 0
            and self.step_s >= 0
            and self.cpu_s >= 0
            and self.wall_s > 0
            and self.nbytes >= 0
        ):
            raise ValueError(f"times must be positive, got {self}")

    @property
    def waiting(self) -> float:
        """Share of a step spent waiting for input."""
        return max(0.0, 1.0 - self.step_s / self.period_s)

    @property
    def occupied_s(self) -> float:
        """Time for which a batch occupies a feeder, at least its CPU time."""
        return max(self.cpu_s, self.wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The verdict on a pipeline."""

    waiting: float
    """Share of a step spent waiting for input."""
    gain: float
    """Possible rate with `feeders`, as a multiple of the current rate, or 1 if there is nothing to gain."""
    feeders: int
    """Number of feeders, with one CPU each, that suffice. It is 0 if there is nothing to gain."""
    limit: Limit
    """The current limit."""
    next_limit: Limit
    """The limit once there are `feeders` feeders."""
    cpus: float
    """CPUs that these feeders keep busy."""
    link: float
    """Bytes per second that these feeders send."""
    one_more: float
    """Rate with one more feeder than `feeders`, as a multiple of the rate with `feeders`."""


def ceilings(pipeline: Pipeline) -> dict[Limit, float]:
    """Returns the rate that each resource allows with any number of feeders, in batches per second of all ranks."""
    found = {Limit.TRAINER: pipeline.ranks / pipeline.step_s if pipeline.step_s > 0 else math.inf}
    if pipeline.link is not None and pipeline.nbytes:
        found[Limit.NETWORK] = LINK_USE * pipeline.link / pipeline.nbytes
    # Each rank has one receiver, which is a single process.
    found[Limit.RECEIVER] = pipeline.ranks / (RECEIVE_S + RECEIVE_S_PER_GB * pipeline.nbytes / 1e9)
    if pipeline.slots is not None:
        found[Limit.SLOTS] = pipeline.slots * pipeline.ranks / pipeline.occupied_s
    return found


def rate(pipeline: Pipeline, feeders: int) -> float:
    """Predicts the rate with this number of feeders, in batches per second of all ranks."""
    return min(feeders / pipeline.occupied_s, in_order(pipeline, feeders), *ceilings(pipeline).values())


def in_order(pipeline: Pipeline, feeders: int) -> float:
    """Returns the rate that the default window allows, in batches per second. The slowest batch of a window delays
    those behind it."""
    if not pipeline.longest_s:
        return math.inf
    return pipeline.ranks * max(WINDOW, WINDOW_PER_FEEDER * feeders) / pipeline.longest_s


def needed(pipeline: Pipeline, ceiling: float, *, is_slots: bool = False) -> int:
    """Returns the smallest number of feeders that make `ceiling` batches per second with some headroom. The sources of
    an iterable dataset (`is_slots`) need no headroom."""
    busy = 1.0 if is_slots else HEADROOM - MOST_SPREAD * min(1.0, pipeline.spread)
    return max(1, math.ceil(ceiling * pipeline.occupied_s / busy - 1e-9))


def maker(pipeline: Pipeline) -> Limit:
    """Returns the limit of the processes that make batches: their CPU, or the storage that they wait for."""
    return Limit.STORAGE if 1 - pipeline.cpu_s / pipeline.occupied_s > WAITS else Limit.CPU


def advise(pipeline: Pipeline, most: int | None = None) -> Advice:
    """Finds the smallest number of feeders that removes the waiting, as far as other resources allow. `most` is the
    maximum number of feeders."""
    allowed = ceilings(pipeline)
    ceiling, now = min(allowed.values()), pipeline.ranks / pipeline.period_s
    next_limit = min(allowed, key=allowed.__getitem__)
    if pipeline.waiting < WORTH or ceiling <= now:
        limit = Limit.TRAINER if pipeline.waiting < WORTH else next_limit
        return Advice(
            waiting=pipeline.waiting, gain=1.0, feeders=0, limit=limit, next_limit=next_limit, cpus=0.0,
            link=now * pipeline.nbytes, one_more=1.0,
        )  # fmt: skip
    feeders = needed(pipeline, ceiling, is_slots=next_limit is Limit.SLOTS)
    if most is not None and feeders > most:
        feeders, next_limit = most, maker(pipeline)
    reached = rate(pipeline, feeders)
    return Advice(
        waiting=pipeline.waiting,
        gain=max(1.0, reached / now),
        feeders=feeders,
        limit=_limit_today(pipeline, now, allowed),
        next_limit=next_limit,
        cpus=reached * pipeline.cpu_s,
        link=reached * pipeline.nbytes,
        one_more=rate(pipeline, feeders + 1) / reached,
    )


def _limit_today(pipeline: Pipeline, now: float, allowed: dict[Limit, float]) -> Limit:
    """Returns the resource that the current rate uses up. If there is none, returns the limit of the processes that
    make batches."""
    full = [limit for limit, most in allowed.items() if limit is not Limit.TRAINER and now > 0.85 * most]
    return min(full, key=allowed.__getitem__) if full else maker(pipeline)


def spread(values: Sequence[float]) -> float:
    """Returns the coefficient of variation, or 0 for fewer than two values."""
    if len(values) < 2 or not (mean := statistics.fmean(values)):
        return 0.0
    return statistics.stdev(values) / mean
