"""The metrics of one receiver. METRICS has a row for each, with its name in Prometheus and a function that reads it.

Ten times a second, the receiver stores its metrics in the control memfd. The parent reads these metrics and the
trainer's from its own mapping, so a scrape never touches the data path.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from dataloaderjob.core import control
from dataloaderjob.core.control import Control
from dataloaderjob.core.costs import QueuedTime
from dataloaderjob.core.supervision import OF_RANK
from dataloaderjob.core.texts import clean
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher

PREFIX = "dataloaderjob_sidecar_"
MAX_LABEL = 512
MAX_ENDED = 64
"""Maximum number of trainer processes whose counts are kept after their receivers have exited."""


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of METRICS. Times are kept in nanoseconds and served in seconds."""

    key: str
    """Name of the metric in the sidecar's status."""
    name: str
    """Name of the metric in Prometheus, after PREFIX."""
    kind: MetricKind
    help: str
    read: Callable[[Dispatcher], int] | int
    """The function that reads the metric from the dispatcher, or the index of the word in which the trainer stores
    it."""
    mask: int = -1
    """Mask of the bits that are served to Prometheus."""


def _ready(machine: Dispatcher) -> int:
    return sum(t.lease is not None for s in machine.streams.values() for t in s.tickets.values())


@functools.lru_cache(maxsize=1)
def _queued_time(pid: int) -> QueuedTime:
    """Returns the clock that measures this process's queued time. `pid`: this process's pid. It is the cache key,
    because a forked process needs its own clock."""
    del pid
    return QueuedTime()


_C, _G = MetricKind.COUNTER, MetricKind.GAUGE
_48_BITS = (1 << 48) - 1
"""Mask of a digest. Prometheus stores floats, which are exact up to 53 bits. If digests were labels, each would start a
new series."""
METRICS = (
    Metric("batches", "batches_total", _C, "Batches received.", lambda m: m.counters.batches),
    Metric("nbytes", "bytes_total", _C, "Bytes of batches received.", lambda m: m.counters.nbytes),
    Metric(
        "attempts", "attempts_total", _C, "Tickets sent to feeders, including retries.",
        lambda m: m.counters.attempts,
    ),
    Metric(
        "retries", "retries_total", _C, "Tickets sent to another feeder because the first one died or fell silent.",
        lambda m: m.counters.retries,
    ),
    Metric(
        "hedges", "hedges_total", _C, "Tickets sent to a second feeder because the first one was slow.",
        lambda m: m.counters.hedges,
    ),
    Metric(
        "late_copies", "late_copies_total", _C, "Batches that arrived after another copy of the same batch.",
        lambda m: m.counters.late_copies,
    ),
    Metric(
        "failures", "failures_total", _C, "Tickets that failed permanently, so the trainer got an error.",
        lambda m: m.counters.failures,
    ),
    Metric(
        "feeders_lost", "feeders_lost_total", _C, "Connections to feeders that ended.",
        lambda m: m.counters.feeders_lost,
    ),
    Metric(
        "drops", "drops_total", _C, "Ready batches dropped to make room for one that the trainer waited for.",
        lambda m: m.placer.drops,
    ),
    Metric("feeders_up", "feeders", _G, "Connected feeders.", lambda m: sum(x.up for x in m.feeders.values())),
    Metric(
        "feeders_suspect", "feeders_suspect", _G, "Connected feeders that have work to do but are silent.",
        lambda m: sum(x.up and x.suspect_since is not None for x in m.feeders.values()),
    ),
    Metric("ready", "ready_batches", _G, "Batches that are ready but not yet taken.", _ready),
    Metric(
        "lent", "held_batches", _G, "Batches that are ready or held by the trainer.", lambda m: len(m.placer.lent)
    ),
    Metric(
        "used_nbytes", "pool_used_bytes", _G, "Shared memory of the pool in use.",
        lambda m: m.placer.space.used_nbytes,
    ),
    Metric(
        "pool_nbytes", "pool_bytes", _G, "Shared memory of the pool.", lambda m: m.placer.space.pool_nbytes
    ),
    Metric(
        "total_nbytes", "shared_memory_bytes", _G, "Shared memory of the pool and of batches too large for it.",
        lambda m: m.placer.space.total_nbytes,
    ),
    Metric(
        "bundle_loads", "bundle_loads", _G, "Times that the connected feeders have loaded user code, for all ranks.",
        lambda m: sum(x.bundle_loads for x in m.feeders.values() if x.up),
    ),
    Metric(
        "receiver_cpu_ns", "receiver_cpu_seconds_total", _C, "CPU time of the process that receives batches.",
        lambda _: time.process_time_ns(),
    ),
    Metric(
        "receiver_queued_ns", "receiver_queued_seconds_total", _C,
        "Time for which the process that receives batches was ready to run, but had no CPU.",
        lambda _: _queued_time(os.getpid()).ns(),
    ),
    Metric(
        "queues_kernels", "trainer_uses_cuda", _G,
        "Use of CUDA: 1 if the trainer has initialized it. Its steps then look shorter than they are, "
        "because kernels run asynchronously.",
        control.W_CUDA,
    ),
    Metric("next_calls", "next_calls_total", _C, "Batches taken by the trainer.", control.W_NEXT_CALLS),
    Metric(
        "ready_calls", "ready_calls_total", _C, "Batches that were ready when the trainer asked for them.",
        control.W_READY_CALLS,
    ),
    Metric("wait_ns", "wait_seconds_total", _C, "Time the trainer waited in next().", control.W_WAIT_NS),
    Metric(
        "step_ns", "step_seconds_total", _C, "Time the trainer spent between calls to next().",
        control.W_STEP_NS,
    ),
    Metric(
        "stage_ns", "device_stage_seconds_total", _C, "Time the trainer's process spent in its device_stage.",
        control.W_STAGE_NS,
    ),
    Metric(
        "copies", "copies_total", _C,
        "Batches copied because the trainer holds its full share of the pool, or because a device reads "
        "the pool directly.",
        control.W_COPIES,
    ),
    Metric("leased_nbytes", "leased_bytes", _G, "Shared memory held by the trainer.", control.W_LEASED_NBYTES),
    Metric("streams", "iterators", _G, "Live iterators.", control.W_STREAMS),
    Metric(
        "digest", "consumed_digest", _G,
        "Lower 48 bits of the digest of all batches taken by the trainer; equal for equal batches in the same order.",
        control.W_DIGEST, _48_BITS,
    ),
)  # fmt: skip
KEYS = tuple(metric.key for metric in METRICS)
COUNTERS = frozenset(metric.key for metric in METRICS if metric.kind is MetricKind.COUNTER)
TRAINERS_COUNTERS = frozenset(
    metric.key for metric in METRICS if metric.kind is MetricKind.COUNTER and isinstance(metric.read, int)
)
"""Counters that the trainer itself keeps. They continue when the trainer's receiver is replaced."""
_READERS = [(metric.key, metric.read) for metric in METRICS if not isinstance(metric.read, int)]
_WORDS = {key: at for at, (key, _) in enumerate(_READERS, control.W_METRICS)} | {
    metric.key: metric.read for metric in METRICS if isinstance(metric.read, int)
}


def store(words: Control, machine: Dispatcher) -> None:
    """Stores the receiver's metrics."""
    for at, (_, value) in enumerate(_READERS, control.W_METRICS):
        words.words[at] = value(machine)
    words.words[control.W_FEEDERS] = words.words[_WORDS["feeders_up"]]


def read(words: Control) -> dict[str, int]:
    """Returns the current values of one receiver, by key."""
    return {key: words.words[_WORDS[key]] for key in KEYS}


def by_rank(receivers: Iterable[tuple[str, Control]]) -> dict[str, list[int]]:
    """Returns the metrics listed in OF_RANK for each rank, summed over processes with the same rank."""
    found: dict[str, list[int]] = {}
    for rank, words in receivers:
        before = found.get(rank, [0] * len(OF_RANK))
        found[rank] = [n + words.words[_WORDS[key]] for n, key in zip(before, OF_RANK, strict=True)]
    return found


class Totals:
    """Sums of the metrics of all receivers, including those that have exited."""

    def __init__(self) -> None:
        self._gone = dict.fromkeys(KEYS, 0)
        self._added: dict[str, dict[str, int]] = {}
        """The last counts of receivers that have exited, by trainer process. A trainer may attach again."""

    def of(self, live: Iterable[dict[str, int]]) -> dict[str, int]:
        """Returns the sums, including the current values of the live receivers."""
        live = list(live)
        return {name: sum((values[name] for values in live), gone) for name, gone in self._gone.items()}

    def ended(self, process: str, last: dict[str, int]) -> None:
        """Adds the last counts of a receiver that has exited, and of its trainer. `process`: the trainer process's
        name."""
        for name in COUNTERS:
            self._gone[name] += last[name]
        self._added[process] = last
        while len(self._added) > MAX_ENDED:
            del self._added[next(iter(self._added))]

    def adopted(self, process: str, living: dict[str, int]) -> None:
        """Prevents a trainer's own counters from being added twice when the trainer attaches again. They were already
        added when its receiver exited, or belong to an earlier sidecar. `living`: the current values."""
        before = self._added.pop(process, living)
        for name in TRAINERS_COUNTERS:
            self._gone[name] -= before[name]


def prometheus(receivers: list[tuple[str, dict[str, int]]], job: str) -> str:
    """Returns the metrics in Prometheus' text format: times in seconds, sizes in bytes. `receivers`: (rank, values)."""
    lines, whose = [], _labels(job)
    for metric in METRICS:
        name = PREFIX + metric.name
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind.value}"]
        for rank, values in receivers:
            value = values[metric.key] & metric.mask
            text = f"{value * 1e-9:.9f}" if metric.key.endswith("_ns") else str(value)
            lines.append(f'{name}{{{whose},rank="{_escaped(rank)}"}} {text}')
    return "\n".join(lines) + "\n"


def _labels(job: str) -> str:
    """Returns a job's labels. On a cluster, `job` is namespace/name/uid; elsewhere, it is a plain name. Prometheus
    itself uses the label `job`."""
    namespace, _, name = job.rpartition("/")[0].rpartition("/") if job.count("/") == 2 else ("", "", job)
    return f'dataloaderjob_namespace="{_escaped(namespace)}",dataloaderjob_name="{_escaped(name)}"'


def _escaped(value: str) -> str:
    """Escapes the value of a label, because a name that a trainer gives itself may contain any character."""
    return clean(value, MAX_LABEL).replace("\\", "\\\\").replace('"', '\\"')
