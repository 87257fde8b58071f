"""The contents of a report, derived from a run's readings: rates between readings, the verdict, and incidents. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dataloaderjob.core import sizing, timings
from dataloaderjob.core.sizing import Advice, Pipeline
from dataloaderjob.local.reporting.rundata import RunData
from dataloaderjob.local.reporting.series import LOST, MEMORY, REPLACED, STARTED, Event, Reading

MOST_POINTS = 240
"""Maximum number of points of a line in a chart."""
BEFORE_S, AFTER_S = 10.0, 10.0
"""Seconds before and after an incident. The ranks' waiting times in the two periods are compared."""
TAIL = 4.0
"""A batch that takes at least this multiple of the median time is slow."""
TRAINING, RECEIVING, MAKING, SERVING = "training", "receiving", "making batches", "sending, supervising"


@dataclass(frozen=True, slots=True)
class Span:
    """The period between two readings. `began` and `ended` are in seconds since the start of the run."""

    began: float
    ended: float
    waiting: Mapping[str, float]
    """The share of its time that each rank spent waiting; ranks that did nothing are omitted."""
    ready: Mapping[str, int]
    """Number of ready batches of each rank at the end of the period."""
    nbytes_per_s: float
    batches_per_s: float
    feeders: int
    desired: int | None
    cpus: Mapping[str, float]
    """Number of CPUs that each group of processes kept busy."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Batches that took at least TAIL times the median time."""

    count: int
    share: float
    """The share of all build time that these batches took."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A feeder that was lost."""

    event: Event
    back_s: float | None
    """Seconds until the feeder served again; None if it did not."""
    before: float | None
    """The share of their time that ranks spent waiting before the incident; None if unknown. `after` is the share after
    the incident."""
    after: float | None


class Analysis:
    """Everything that is derived from one run."""

    def __init__(self, data: RunData) -> None:
        self.data = data
        self.readings = data.series.readings
        self.times = data.times

    @property
    def last(self) -> Reading:
        return self.readings[-1] if self.readings else Reading(at=0.0)

    @property
    def ranks(self) -> list[str]:
        return sorted(self.last.ranks, key=lambda rank: (len(rank), rank))

    @property
    def batches(self) -> int:
        return self.last.counts.get("next_calls", 0)

    @property
    def nbytes(self) -> int:
        return self.last.counts.get("nbytes", 0)

    @cached_property
    def steady(self) -> Mapping[str, int]:
        """Counts since the first batches. Before those, training only waits for feeders to start."""
        first = next((r.counts for r in self.readings if r.counts.get("next_calls")), {})
        return {name: count - first.get(name, 0) for name, count in self.last.counts.items()}

    @cached_property
    def waiting(self) -> float | None:
        """The share of their time that all ranks spent waiting after the first batches; None if no batches followed."""
        return _waiting(self.steady)

    def waiting_of(self, rank: str) -> float | None:
        found = self.last.ranks[rank]
        total = found.wait_ns + found.step_ns
        return found.wait_ns / total if total else None

    @cached_property
    def first_batch_at(self) -> float | None:
        return next((r.at for r in self.readings if r.counts.get("next_calls")), None)

    @cached_property
    def last_batch_at(self) -> float:
        """Time of the first reading after the last batch."""
        return next((r.at for r in self.readings if r.counts.get("next_calls") == self.batches), self.last.at)

    @cached_property
    def spans(self) -> list[Span]:
        step = max(1, -(-(len(self.readings) - 1) // MOST_POINTS))
        kept = self.readings[::step]
        if self.readings and kept[-1] is not self.readings[-1]:
            kept.append(self.readings[-1])
        pairs = [(a, b) for a, b in itertools.pairwise(kept) if b.at - a.at > 1e-3]
        waits = {rank: _shares(rank, pairs) for rank in self.ranks}
        return [
            _span(a, b, {r: w for r in waits if (w := waits[r][i]) is not None})
            for i, (a, b) in enumerate(pairs)
        ]

    @cached_property
    def own_cpus(self) -> float:
        """The mean number of CPUs that this run kept busy from its first to its last batch."""
        within = [r for r in self.readings if (self.first_batch_at or 0.0) <= r.at <= self.last_batch_at]
        if len(within) < 2:
            return 0.0
        first, last = within[0], within[-1]
        return sum(max(0.0, t - first.cpu.get(role, 0.0)) for role, t in last.cpu.items()) / (
            last.at - first.at
        )

    @property
    def most_cpus(self) -> float:
        """The maximum number of CPUs that this run kept busy."""
        return max((sum(span.cpus.values()) for span in self.spans), default=0.0)

    @property
    def nears_all_cpus(self) -> bool:
        """True if the number of CPUs is on the scale of what this run used, so that a chart can show it."""
        return 0 < self.data.cpus <= 3 * self.most_cpus

    # Times of batches

    @cached_property
    def queued(self) -> float:
        """The share of build time for which builders were ready to run but had no CPU."""
        sums = self.times.sums
        return sums.queued_ns / sums.wall_ns if sums.wall_ns else 0.0

    @cached_property
    def tail(self) -> Tail | None:
        """Slow batches; None if there are none."""
        median = self.times.quantile(0.5)
        if median is None:
            return None
        least = timings.bucket_of(round(TAIL * median * 1e9))
        total = sum(n * timings.begin_of(i + 0.5) for i, n in enumerate(self.times.buckets))
        count = sum(self.times.buckets[least:])
        slow = sum(n * timings.begin_of(i + 0.5) for i, n in enumerate(self.times.buckets) if i >= least)
        return Tail(count, slow / total) if count else None

    @property
    def is_heavy_tailed(self) -> bool:
        """True if a few batches take a large share of the build time."""
        return (
            self.tail is not None
            and self.tail.share > 0.25
            and self.tail.count < 0.15 * sum(self.times.buckets)
        )

    # The verdict

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The pipeline model's input; None until there are batches and their times."""
        sums, counts = self.times.sums, self.steady
        calls = counts.get("next_calls", 0)
        if calls <= 0 or not sums.count or not self.ranks:
            return None
        step_s = max(0, counts.get("step_ns", 0)) / 1e9 / calls
        wall_s = max(1, sums.wall_ns - sums.queued_ns) / 1e9 / sums.count
        return Pipeline(
            period_s=max(1e-9, step_s + max(0, counts.get("wait_ns", 0)) / 1e9 / calls),
            step_s=step_s,
            cpu_s=sums.cpu_ns / 1e9 / sums.count,
            wall_s=wall_s,
            nbytes=sums.nbytes // sums.count,
            spread=sums.spread,
            longest_s=self.times.longest_of(sizing.WINDOW) * (1 - self.queued),
            ranks=len(self.ranks),
            slots=sums.slots or None,
        )

    @cached_property
    def advice(self) -> Advice | None:
        return None if self.pipeline is None else sizing.advise(self.pipeline)

    @property
    def feeders(self) -> int:
        """The most common number of feeders among the readings since the first batch."""
        found = [r.feeders for r in self.readings if r.counts.get("next_calls")]
        return statistics.mode(found) if found else self.last.feeders

    # Incidents

    @cached_property
    def incidents(self) -> list[Incident]:
        events = self.data.series.events
        found: list[Incident] = []
        for number, event in enumerate(events):
            is_loss = event.kind in (LOST, MEMORY, REPLACED) and event.who.startswith("feeder-")
            if not is_loss or (
                found and found[-1].event.who == event.who and event.at - found[-1].event.at < 1.0
            ):
                continue
            back = event if event.kind == REPLACED else _back(event.who, events[number + 1 :])
            before = self._waiting_between(event.at - BEFORE_S, event.at - 0.5)
            after = self._waiting_between(event.at - 0.5, event.at + AFTER_S)
            found.append(Incident(event, None if back is None else back.at - event.at, before, after))
        return found

    def _waiting_between(self, began: float, ended: float) -> float | None:
        within = [r for r in self.readings if began <= r.at <= ended and r.ranks]
        if len(within) < 2:
            return None
        a, b = within[0].counts, within[-1].counts
        return _waiting({name: b[name] - a.get(name, 0) for name in b})


def _back(who: str, events: Sequence[Event]) -> Event | None:
    return next((e for e in events if e.who == who and e.kind in (STARTED, REPLACED)), None)


def _waiting(counts: Mapping[str, int]) -> float | None:
    total = counts.get("wait_ns", 0) + counts.get("step_ns", 0)
    return counts.get("wait_ns", 0) / total if total > 0 else None


def _shares(rank: str, pairs: Sequence[tuple[Reading, Reading]]) -> list[float | None]:
    """Returns the share of each span that a rank spent waiting; None for a span if its share is unknown.

    A wait or a step is counted once it has ended. If it began before the span in which it ended, its earlier part
    belongs to earlier spans.
    """
    found: list[float | None] = []
    open_: list[int] = []
    """The consecutive spans without a batch that precede this span."""
    for number, (a, b) in enumerate(pairs):
        found.append(None)
        now, was = b.ranks.get(rank), a.ranks.get(rank)
        if now is None or not now.next_calls:
            continue
        wait = (now.wait_ns - (was.wait_ns if was else 0)) / 1e9
        step = (now.step_ns - (was.step_ns if was else 0)) / 1e9
        if wait + step <= 0:
            open_.append(number)
            continue
        seconds = sum(pairs[i][1].at - pairs[i][0].at for i in open_)
        ended = wait if wait > step else step
        if open_ and seconds and ended > b.at - a.at:
            for i in open_:
                found[i] = 1.0 if wait > step else 0.0
            wait, step = (max(0.0, wait - seconds), step) if wait > step else (wait, max(0.0, step - seconds))
        open_.clear()
        found[-1] = min(1.0, max(0.0, wait / max(1e-9, wait + step)))
    return found


def _span(a: Reading, b: Reading, waiting: Mapping[str, float]) -> Span:
    seconds = b.at - a.at
    cpus = dict.fromkeys((TRAINING, RECEIVING, MAKING, SERVING), 0.0)
    for role, total in b.cpu.items():
        cpus[group_of(role)] += max(0.0, total - a.cpu.get(role, 0.0)) / seconds
    return Span(
        began=a.at, ended=b.at, waiting=waiting, ready={rank: r.ready for rank, r in b.ranks.items() if r.ready >= 0},
        nbytes_per_s=max(0, b.counts.get("nbytes", 0) - a.counts.get("nbytes", 0)) / seconds,
        batches_per_s=max(0, b.counts.get("next_calls", 0) - a.counts.get("next_calls", 0)) / seconds,
        feeders=b.feeders, desired=b.desired, cpus=cpus,
    )  # fmt: skip


def group_of(role: str) -> str:
    """Returns the group of processes that a role belongs to."""
    if role.startswith("rank "):
        return TRAINING
    if role == "sidecar" or role.startswith("receiver"):
        return RECEIVING
    return MAKING if role.endswith(", batches") else SERVING
