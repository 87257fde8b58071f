"""Measures of a job's last minute, derived from the running sums of its trainers, receivers and feeders. Pure.

The supervisor adds one reading a second to a `MeasuresWindow`. `Measures` is the summary in its status. Sums are
compared only between readings of the same process, so a process that starts or exits does not distort the measures.

- Until a sidecar's trainers have taken FIRST batches, their times are startup times, and do not count.
- Nothing counts while there are no live iterators, or more or fewer than usual, such as during an evaluation. So the
  feeders do not look idle after a script has left its loop.
- Once there are enough batches with the current number of feeders, earlier ones do not count.
- The step is a median over readings, because one long step, such as at a checkpoint, is no reason for fewer feeders.
- On CUDA, kernels are queued. A trainer that waits for input requests the next batch as soon as it has launched a step.
  The step then looks shorter than it is. So the window keeps the last step that was measured while trainers hardly
  waited (`calm_step_s`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataloaderjob.core.costs import SLOTS

WINDOW_S = 60.0
LONGEST_S = 600.0
"""Maximum span of the window, in seconds, used if there are fewer than ENOUGH batches in a minute."""
RECENT_S = 15.0
FIRST = 8
"""Number of batches of a sidecar's trainers that do not count, because they belong to the start of a job."""
ENOUGH = 12
"""Number of batches below which no measures are available."""
USUAL_S, USUAL_AFTER_S = 300.0, 30.0
"""The usual number of iterators is the median over the last USUAL_S seconds. It is known after USUAL_AFTER_S
seconds."""
CALM = 0.01
"""Share of time spent waiting below which a measured step depends on training alone."""
PARTS = 1.6
"""Ratio of batches built to batches taken. At this ratio or above, each of the trainer's batches consists of
several."""
_READ = ("next_calls", "wait_ns", "step_ns", "nbytes", "receiver_cpu_ns", "receiver_queued_ns")
_LARGEST = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The last minute of a job. Times are in seconds, and for one batch of one rank unless stated otherwise."""

    seconds: float
    """Span of the readings."""
    ranks: int
    batches: int
    """Batches that trainers have taken in that span."""
    rate: float
    """Batches per second of all ranks, over the last RECENT_S."""
    waiting: float
    """Share of time spent waiting in next(), over the last RECENT_S."""
    wait_s: float
    step_s: float
    calm_step_s: float = 0.0
    """The last step that was measured while trainers hardly waited. 0 if there is none since the number of ranks
    changed."""
    queues_kernels: bool = False
    """True if trainers use CUDA. While they wait, `step_s` may then be shorter than the actual step."""
    is_steady: bool = True
    """False while there are more or fewer live iterators than usual: between epochs, or during an evaluation."""
    nbytes: int = 0
    receiving: float = 0.0
    """Average share of time for which a receiver works, or is ready to work but has no CPU."""
    cpu_s: float = 0.0
    """CPU time to make a batch."""
    wall_s: float = 0.0
    """Time for which a batch occupies its feeder, or 0 until a feeder has reported a time."""
    queued_s: float = 0.0
    """Part of `wall_s` during which the feeder was ready to run but had no CPU."""
    spread: float = 0.0
    """Coefficient of variation of `wall_s`."""
    feeders: int = 0
    """Number of feeders that serve."""
    busy: float = 0.0
    """Average share of time that feeders spend making batches."""
    sending: float = 0.0
    """Average share of time during which a feeder's finished batch waits for its connection."""
    slots: int = 0
    """Number of slots of iterable datasets that feeders are reading."""

    def as_dict(self) -> dict[str, Any]:
        return {
            name: round(value, 9) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(self).items()
        }


def parse(found: object) -> Measures | None:
    """Returns the measures in a status, or None if there are none, or if any of them is not a number."""
    if not isinstance(found, Mapping):
        return None
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Measures):
        value = found.get(field.name, field.default)
        if field.type in ("bool", bool):
            values[field.name] = value is True
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
            return None
        else:
            values[field.name] = int(value) if field.type in ("int", int) else float(value)
    made = Measures(**values)
    return made if made.seconds and made.ranks and made.batches else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The increase in all sums since the previous reading."""

    at: float
    seconds: float
    calls: int = 0
    wait_ns: int = 0
    step_ns: int = 0
    nbytes: int = 0
    receiver_busy_ns: int = 0
    """CPU time of receivers, plus the time during which they were ready to run but had no CPU."""
    ranks: int = 0
    """Number of receivers in those sidecars whose trainers have taken a batch since the previous reading."""
    receivers: int = 0
    iterators: int = 0
    costs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    feeders: int = 0


class MeasuresWindow:
    """The readings of the last minute, and a summary of earlier ones."""

    def __init__(self) -> None:
        self._readings: deque[_Reading] = deque()
        self._sidecars: dict[str, Mapping[str, int]] = {}
        self._costs: dict[str, Mapping[str, int]] = {}
        self._at: float | None = None
        self._iterators: deque[tuple[float, int]] = deque()
        """(time, live iterators) for each reading of the last USUAL_S."""
        self._is_steady = True
        self._slots = 0
        self._queues_kernels = False
        self._calm: tuple[int, float] = (0, 0.0)
        """Number of ranks, and the last step measured while they hardly waited."""

    def add(
        self,
        now: float,
        sidecars: Mapping[str, Mapping[str, Any]],
        costs: Mapping[str, Mapping[str, int]],
        feeders: int,
    ) -> None:
        """Adds a reading: the sidecars' last reports by name, the feeders' sums by instance, and the number of feeders
        that serve."""
        sums: dict[str, Mapping[str, int]] = {name: _sums(report) for name, report in sidecars.items()}
        if self._at is not None and now > self._at:
            reading = self._rise(now, now - self._at, sums, costs, feeders)
            self._is_steady = self._is_usual(reading)
            if self._is_steady:
                self._readings.append(reading)
        self._at, self._sidecars, self._costs = now, sums, dict(costs)
        self._slots = sum(report.get(SLOTS, 0) for report in costs.values())
        self._queues_kernels = any(report["queues_kernels"] for report in sums.values())
        self._drop_old(now)

    def _is_usual(self, reading: _Reading) -> bool:
        known = self._iterators
        known.append((reading.at, reading.iterators))
        while known[0][0] < reading.at - USUAL_S:
            known.popleft()
        if known[-1][0] - known[0][0] < USUAL_AFTER_S:
            return True
        return reading.iterators == statistics.median_low([number for _, number in known])

    def _rise(
        self,
        now: float,
        seconds: float,
        sums: Mapping[str, Mapping[str, int]],
        costs: Mapping[str, Mapping[str, int]],
        feeders: int,
    ) -> _Reading:
        rise = dict.fromkeys(_READ, 0)
        ranks = receivers = 0
        for name, after in sums.items():
            before = self._sidecars.get(name)
            if before is None or before["next_calls"] < max(FIRST, after["receivers"]):
                continue
            if any(after[counter] < before[counter] for counter in _READ):  # it has restarted
                continue
            for counter in _READ:
                rise[counter] += after[counter] - before[counter]
            receivers += after["receivers"]
            ranks += after["receivers"] if after["next_calls"] > before["next_calls"] else 0
        made: dict[str, int] = {}
        for instance, report in costs.items():
            earlier = self._costs.get(instance)
            if earlier is not None:
                for counter, total in report.items():
                    made[counter] = made.get(counter, 0) + max(0, total - earlier.get(counter, 0))
        return _Reading(
            at=now, seconds=seconds, calls=rise["next_calls"], wait_ns=rise["wait_ns"], step_ns=rise["step_ns"],
            nbytes=rise["nbytes"], ranks=ranks, receivers=receivers,
            receiver_busy_ns=rise["receiver_cpu_ns"] + rise["receiver_queued_ns"],
            iterators=sum(report["streams"] for report in sums.values()), costs=made, feeders=feeders,
        )  # fmt: skip

    def _drop_old(self, now: float) -> None:
        readings = self._readings
        batches = sum(reading.calls for reading in readings)
        while readings and readings[0].at < now - WINDOW_S:
            batches -= readings[0].calls
            if batches < ENOUGH and readings[0].at >= now - LONGEST_S:
                return
            readings.popleft()

    def measures(self) -> Measures | None:
        """Returns the summary, or None while there are fewer than ENOUGH batches."""
        readings = self._current()
        batches = sum(reading.calls for reading in readings)
        if batches < ENOUGH:
            return None
        last, seconds = readings[-1], sum(reading.seconds for reading in readings)
        ranks = max(1, round(statistics.median([r.ranks for r in readings if r.calls])))
        wait_s, step_s = sum(r.wait_ns for r in readings) / batches / 1e9, _median_step_s(readings)
        recent = [r for r in readings if r.at > last.at - RECENT_S]
        self._remember(ranks, readings)
        spent = sum(r.seconds * r.receivers for r in readings)
        return Measures(
            seconds=seconds, ranks=ranks, batches=batches, wait_s=wait_s, step_s=step_s,
            rate=sum(r.calls for r in recent) / max(1e-9, sum(r.seconds for r in recent)),
            waiting=_waiting(recent), calm_step_s=self._calm[1], queues_kernels=self._queues_kernels,
            is_steady=self._is_steady,
            nbytes=sum(r.nbytes for r in readings) // batches,
            receiving=min(1.0, sum(r.receiver_busy_ns for r in readings) / 1e9 / max(1e-9, spent)),
            feeders=last.feeders, slots=self._slots, **_of_feeders(readings, batches),
        )  # fmt: skip

    def _current(self) -> list[_Reading]:
        """Returns the readings that count: those with the current number of feeders or, if these are too few, all."""
        readings = [r for r in self._readings if r.receivers and (r.iterators or r.calls)]
        for start in range(len(readings) - 1, 0, -1):
            if readings[start - 1].feeders != readings[-1].feeders:
                current = readings[start:]
                suffices = sum(r.calls for r in current) >= ENOUGH and _between_reports(current)
                return current if suffices else readings
        return readings

    def _remember(self, ranks: int, readings: Sequence[_Reading]) -> None:
        """Keeps the step that was measured while trainers hardly waited."""
        if self._calm[0] != ranks:
            self._calm = ranks, 0.0
        calm = [reading for reading in readings if reading.calls and _waiting([reading]) < CALM]
        if sum(reading.calls for reading in calm) >= ENOUGH:
            self._calm = ranks, _median_step_s(calm)


def _sums(report: Mapping[str, Any]) -> dict[str, int]:
    metrics = report.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    found = {name: _whole(metrics.get(name)) for name in (*_READ, "streams", "queues_kernels")}
    return {**found, "receivers": _whole(report.get("receivers"))}


def _whole(found: object) -> int:
    return found if type(found) is int and found >= 0 else 0


def _waiting(readings: Sequence[_Reading]) -> float:
    waited, worked = sum(r.wait_ns for r in readings), sum(r.step_ns for r in readings)
    return waited / (waited + worked) if waited else 0.0


def _median_step_s(readings: Sequence[_Reading]) -> float:
    """Returns the median of the readings' mean steps, weighted by their numbers of batches."""
    steps = sorted((r.step_ns / r.calls, r.calls) for r in readings if r.calls)
    half, seen = sum(calls for _, calls in steps) / 2, 0
    for step_ns, calls in steps:
        seen += calls
        if seen >= half:
            return step_ns / 1e9
    return 0.0


def _of_feeders(readings: Sequence[_Reading], batches: int) -> dict[str, Any]:
    """Summarizes the feeders' sums. Feeders may build several batches for one batch of a trainer. With `parts=`, they
    build its parts. With `stage=`, one of them reads, and another runs the stage."""
    total: dict[str, int] = {}
    for reading in readings:
        for counter, rise in reading.costs.items():
            total[counter] = total.get(counter, 0) + rise
    built, reported = total.get("built", 0), _between_reports(readings)
    if not built or not reported:
        return {}
    served = sum(r.seconds * r.feeders for r in reported)
    each = built / batches
    parts = round(each) if each >= PARTS else 1
    wall_s = total["wall_ns"] / built / 1e9
    variance = max(0.0, total["wall_us2"] / built / 1e12 - wall_s**2)
    cpu_ns = total["samples_ns"] + total["collate_ns"] + total["encode_ns"]
    return {
        "cpu_s": parts * cpu_ns / built / 1e9,
        "wall_s": parts * wall_s,
        "queued_s": min(parts * total["queued_ns"] / built / 1e9, parts * wall_s),
        "spread": math.sqrt(variance) / wall_s if wall_s else 0.0,
        "busy": min(1.0, sum(r.costs.get("wall_ns", 0) for r in reported) / 1e9 / max(1e-9, served)),
        "sending": total["sending"] / max(1, total["looks"]),
    }


def _between_reports(readings: Sequence[_Reading]) -> Sequence[_Reading]:
    """Returns the readings after the feeders' first report, up to their last one. Returns none if there is only one
    report.

    Feeders report less often than readings are made, so the other readings contain only part of the feeders' time.
    """
    reported = [number for number, reading in enumerate(readings) if reading.costs.get("looks")]
    return readings[reported[0] + 1 : reported[-1] + 1] if reported else ()
