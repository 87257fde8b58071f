"""The verdict on a live job, derived from its measures: its wait for input, its bottleneck, and the feeders that it
needs. Pure.

`core.sizing` predicts a bottleneck. This module finds the current one in the measures. It is the receiver, the feeders
or the connections, if one of these is busy. If none is busy, changing the number of feeders does not help.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dataloaderjob.core.measures import Measures
from dataloaderjob.core.sizing import WAITS, WORTH, Limit, Pipeline, ceilings, needed

FULL = 0.85
"""A receiver that is busy for at least this share of time is the bottleneck."""
BUSY = 0.6
"""Feeders that are busy for at least this share of time are the bottleneck. The share is smaller than FULL because
feeders are idle between two epochs."""
SENDING = 0.5
"""If finished batches wait for their connection for at least this share of time, the network is the bottleneck."""
IDLE = 0.85
"""If this share of the feeders would suffice, there are too many feeders."""
MOST = 1024
"""Maximum number of feeders recommended, because a loop that does no work could take any number of batches."""
ENDLESS = (
    "The loop does almost nothing between two batches, so each feeder makes it faster and no number is enough: "
    "measure with training"
)
UNKNOWN = "unknown"
OK = "ok"


class LiveLimit(StrEnum):
    """The resource that limits a live job, in one word."""

    FEEDERS = "feeders"
    """The feeders' CPUs."""
    STORAGE = "storage"
    """Feeders wait for data."""
    SLOTS = "slots"
    """An iterable dataset has no more sources that can be read in parallel."""
    NETWORK = "network"
    """Finished batches wait for their connection."""
    RECEIVER = "receiver"
    """The process that receives batches next to a trainer."""
    ORDER = "order"
    """None of the above: individual batches are late, or the loop restarts often."""
    TRAINER = "trainer"
    """Training itself, which does not wait."""


BY_NUMBER = (LiveLimit.FEEDERS, LiveLimit.STORAGE, LiveLimit.SLOTS)
"""Bottlenecks that a different number of feeders may remove."""
REASONS = {
    LiveLimit.FEEDERS: "the feeders' CPUs are the limit",
    LiveLimit.STORAGE: "feeders mostly wait for data, so storage is the limit",
    LiveLimit.SLOTS: "the number of sources of the iterable dataset (num_workers) is the limit",
    LiveLimit.NETWORK: "finished batches wait to be sent, so the network is the limit",
    LiveLimit.RECEIVER: "the process that receives batches alongside the trainer is the limit",
    LiveLimit.ORDER: (
        "feeders are partly idle, so more of them would not help: some batches take long, epochs are "
        "short, or the window is small"
    ),
}
REMEDIES = {
    LiveLimit.SLOTS: "raise num_workers, or use stage=",
    LiveLimit.NETWORK: "send less data, such as uint8 or encoded images",
    LiveLimit.RECEIVER: "send less data, give it more CPU, or use more ranks",
    LiveLimit.ORDER: "try parts= or a larger prefetch_factor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputVerdict:
    """The verdict on a job with enough batches."""

    waiting: float
    """Share of a step spent waiting for input."""
    limit: LiveLimit
    gain: float
    """Predicted rate with `feeders`, as a multiple of the current rate, or 1 if there is nothing to gain."""
    feeders: int
    """Recommended number of feeders. It may be smaller than the current number."""
    now: int
    """Current number of feeders that serve."""

    @property
    def is_bound(self) -> bool:
        return self.waiting >= WORTH

    @property
    def is_endless(self) -> bool:
        """True if a loop does so little between two batches that no number of feeders would remove the wait."""
        return self.feeders == MOST > self.now

    @property
    def word(self) -> str:
        """The bottleneck in one word, or `ok`."""
        return str(self.limit) if self.is_bound else OK

    def column(self, number: int, current: int) -> str:
        """Returns the word, and the recommended number if there is one that differs from the current one, such as
        `feeders 12` or `ok`."""
        return self.word if number == current or self.is_endless else f"{self.word} {number}"

    def sentence(self, number: int | None = None, current: int | None = None, unit: str = "feeders") -> str:
        """Explains the verdict in a sentence. `number` and `current` are the recommended and the current number of
        `unit`."""
        number, current = self.feeders if number is None else number, self.now if current is None else current
        if not self.is_bound:
            text = f"training hardly waits for input ({self.waiting:.0%} of each step)"
            return f"{text}; {number} {unit} instead of {current} would suffice" if number < current else text
        text = f"training waits for input for {self.waiting:.0%} of each step; {REASONS[self.limit]}"
        if self.is_endless:
            return f"{text}. {ENDLESS}"
        if number > current:
            return f"{text}; {number} {unit} instead of {current} would make it {self.gain:.1f} times faster"
        return f"{text}; {REMEDIES[self.limit]}" if self.limit in REMEDIES else text


def pipeline_of(measures: Measures) -> Pipeline:
    """Returns the model's view of a live job. On CUDA, the step is at least `Measures.calm_step_s`."""
    step_s = max(measures.step_s, measures.calm_step_s if measures.queues_kernels else 0.0)
    period_s = measures.wait_s + measures.step_s
    return Pipeline(
        period_s=max(period_s, 1e-9), step_s=min(step_s, period_s), cpu_s=measures.cpu_s,
        wall_s=max(measures.wall_s, 1e-9), nbytes=measures.nbytes, spread=measures.spread, ranks=measures.ranks,
        slots=max(1, measures.slots // measures.ranks) if measures.slots else None,
    )  # fmt: skip


def judge(measures: Measures | None) -> InputVerdict | None:
    """Returns the verdict on a job, or None if there are too few batches or no feeder has reported a cost."""
    if measures is None or not measures.wall_s or not measures.feeders:
        return None
    pipeline = pipeline_of(measures)
    limit = _limit(measures, pipeline)
    ceiling, is_slots = demand(measures, pipeline, limit)
    feeders = min(MOST, needed(pipeline, ceiling, is_slots=is_slots))
    if limit not in BY_NUMBER:
        feeders = min(feeders, measures.feeders)
    if IDLE * measures.feeders < feeders <= measures.feeders:
        feeders = measures.feeders
    gain = _rate(pipeline, ceiling, feeders) / max(measures.rate, 1e-9) if feeders > measures.feeders else 1.0
    return InputVerdict(
        waiting=pipeline.waiting, limit=limit, gain=max(1.0, gain), feeders=feeders, now=measures.feeders
    )


def predicted(measures: Measures, feeders: int) -> float:
    """Predicts the rate with more feeders than now, in batches per second of all ranks."""
    pipeline = pipeline_of(measures)
    limit = _limit(measures, pipeline)
    if limit not in (LiveLimit.FEEDERS, LiveLimit.STORAGE, LiveLimit.TRAINER):
        return measures.rate
    return _rate(pipeline, demand(measures, pipeline, limit)[0], feeders)


def _rate(pipeline: Pipeline, ceiling: float, feeders: int) -> float:
    return min(feeders / pipeline.occupied_s, ceiling)


def _limit(measures: Measures, pipeline: Pipeline) -> LiveLimit:
    if pipeline.waiting < WORTH:
        return LiveLimit.TRAINER
    if measures.receiving >= FULL:
        return LiveLimit.RECEIVER
    if measures.sending >= SENDING and measures.sending > measures.busy:
        return LiveLimit.NETWORK
    slots = ceilings(pipeline).get(Limit.SLOTS)
    full = (
        FULL if measures.feeders < measures.slots else BUSY
    )  # once each slot has a feeder, more feeders have nothing to do
    if slots is not None and pipeline.ranks / pipeline.period_s >= full * slots:
        return LiveLimit.SLOTS
    if measures.busy < BUSY:
        return LiveLimit.ORDER
    idle_s = measures.wall_s - measures.cpu_s - measures.queued_s
    return LiveLimit.STORAGE if idle_s > WAITS * measures.wall_s else LiveLimit.FEEDERS


def demand(measures: Measures, pipeline: Pipeline, limit: LiveLimit) -> tuple[float, bool]:
    """Returns (rate, is_slots). `rate` is the rate, in batches per second, that all resources except feeders allow.
    `is_slots` is True if the slots of an iterable dataset limit it. A resource that is fully used allows only the
    current rate."""
    now = measures.rate
    allowed = ceilings(pipeline)
    if measures.receiving < FULL:  # the model describes any machine, but the measurement is of this one
        allowed[Limit.RECEIVER] = max(allowed[Limit.RECEIVER], FULL * now / max(measures.receiving, 1e-9))
    if limit in (LiveLimit.NETWORK, LiveLimit.RECEIVER):
        return min(now, *allowed.values()), False
    lowest = min(allowed, key=allowed.__getitem__)
    return allowed[lowest], lowest is Limit.SLOTS
