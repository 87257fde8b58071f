"""Metrics of one receiver: one row for each, with its name in Prometheus and how it is read.

The receiver stores its own in words of the control memfd ten times a second; the parent reads them, and the
trainer's, from its own mapping. So a scrape never touches the data path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from dataloaderjob.core import control
from dataloaderjob.core.control import Control
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher

PREFIX = "dataloaderjob_sidecar_"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. Times are kept in nanoseconds and served in seconds."""

    key: str
    """Its name in the sidecar's status."""
    name: str
    """Its name in Prometheus, behind PREFIX."""
    kind: Kind
    help: str
    read: Callable[[Dispatcher], int] | int
    """Reads it from the receiver's machine; or the word that the trainer stores."""
    mask: int = -1
    """Bits that Prometheus gets."""


def _ready(machine: Dispatcher) -> int:
    return sum(t.lease is not None for s in machine.streams.values() for t in s.tickets.values())


_C, _G = Kind.COUNTER, Kind.GAUGE
_48_BITS = (1 << 48) - 1
"""Prometheus keeps floats, which are exact up to 53 bits; eight bytes in a label would be a new series each time."""
METRICS = (
    Metric("batches", "batches_total", _C, "Batches received.", lambda m: m.counters.batches),
    Metric("nbytes", "bytes_total", _C, "Bytes of the batches received.", lambda m: m.counters.nbytes),
    Metric("attempts", "attempts_total", _C, "Tickets sent to feeders, with retries.", lambda m: m.counters.attempts),
    Metric(
        "retries", "retries_total", _C, "Tickets sent to another feeder because the first one died or fell silent.",
        lambda m: m.counters.retries,
    ),
    Metric(
        "hedges", "hedges_total", _C, "Tickets sent to a second feeder because the first one is slow.",
        lambda m: m.counters.hedges,
    ),
    Metric(
        "late_copies", "late_copies_total", _C, "Batches that came after another copy of them.",
        lambda m: m.counters.late_copies,
    ),
    Metric(
        "failures", "failures_total", _C, "Tickets that failed for good: the trainer got an error.",
        lambda m: m.counters.failures,
    ),
    Metric(
        "feeders_lost", "feeders_lost_total", _C, "Connections to feeders that ended.",
        lambda m: m.counters.feeders_lost,
    ),
    Metric(
        "drops", "drops_total", _C, "Ready batches dropped to make room for one that the trainer waits for.",
        lambda m: m.placer.drops,
    ),
    Metric("feeders_up", "feeders", _G, "Feeders connected.", lambda m: sum(x.up for x in m.feeders.values())),
    Metric(
        "feeders_suspect", "feeders_suspect", _G, "Feeders connected that have work to do and are silent.",
        lambda m: sum(x.up and x.suspect_since is not None for x in m.feeders.values()),
    ),
    Metric("ready", "ready_batches", _G, "Batches that are ready and not yet taken.", _ready),
    Metric(
        "lent", "held_batches", _G, "Batches that are ready or that the trainer holds.", lambda m: len(m.placer.lent)
    ),
    Metric(
        "used_nbytes", "pool_used_bytes", _G, "Shared memory of the pool that is in use.",
        lambda m: m.placer.space.used_nbytes,
    ),
    Metric(
        "pool_nbytes", "pool_bytes", _G, "Shared memory of the pool.", lambda m: m.placer.space.pool_nbytes
    ),
    Metric(
        "total_nbytes", "shared_memory_bytes", _G, "Shared memory of the pool, and of batches too large for it.",
        lambda m: m.placer.space.total_nbytes,
    ),
    Metric(
        "bundle_loads", "bundle_loads", _G, "Times that the connected feeders loaded user code, for all ranks.",
        lambda m: sum(x.bundle_loads for x in m.feeders.values() if x.up),
    ),
    Metric("next_calls", "next_calls_total", _C, "Batches taken by the trainer.", control.W_NEXT_CALLS),
    Metric(
        "ready_calls", "ready_calls_total", _C, "Batches that were ready when the trainer asked for them.",
        control.W_READY_CALLS,
    ),
    Metric("wait_ns", "wait_seconds_total", _C, "Time that the trainer waited in next().", control.W_WAIT_NS),
    Metric(
        "step_ns", "step_seconds_total", _C, "Time that the trainer spent between calls of next().",
        control.W_STEP_NS,
    ),
    Metric(
        "stage_ns", "device_stage_seconds_total", _C, "Time that the trainer's process spent in its device_stage.",
        control.W_STAGE_NS,
    ),
    Metric(
        "copies", "copies_total", _C,
        "Batches copied for the trainer because it holds as many as it may, or a device reads the pool by itself.",
        control.W_COPIES,
    ),
    Metric("leased_nbytes", "leased_bytes", _G, "Shared memory that the trainer holds.", control.W_LEASED_NBYTES),
    Metric("streams", "iterators", _G, "Iterators that live.", control.W_STREAMS),
    Metric(
        "digest", "consumed_digest", _G,
        "Digest of all batches that the trainer took, its lower 48 bits: equal for equal batches in the same order.",
        control.W_DIGEST, _48_BITS,
    ),
)  # fmt: skip
KEYS = tuple(metric.key for metric in METRICS)
COUNTERS = frozenset(metric.key for metric in METRICS if metric.kind is Kind.COUNTER)
TRAINERS_COUNTERS = frozenset(
    metric.key for metric in METRICS if metric.kind is Kind.COUNTER and isinstance(metric.read, int)
)
"""Those that the trainer counts itself: they go on when its receiver is another."""
_READERS = [(metric.key, metric.read) for metric in METRICS if not isinstance(metric.read, int)]
_WORDS = {key: at for at, (key, _) in enumerate(_READERS, control.W_METRICS)} | {
    metric.key: metric.read for metric in METRICS if isinstance(metric.read, int)
}


def store(words: Control, machine: Dispatcher) -> None:
    """Writes the receiver's."""
    for at, (_, value) in enumerate(_READERS, control.W_METRICS):
        words.words[at] = value(machine)
    words.words[control.W_FEEDERS] = words.words[_WORDS["feeders_up"]]


def read(words: Control) -> dict[str, int]:
    """The values of one receiver at this moment, by key."""
    return {key: words.words[_WORDS[key]] for key in KEYS}


def prometheus(receivers: list[tuple[str, dict[str, int]]], job: str) -> str:
    """The text format; times in seconds, sizes in bytes. `receivers`: the rank and the values of each."""
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
    """A job on a cluster is namespace/name/uid, one without a cluster a name alone. `job` is a label of Prometheus'."""
    namespace, _, name = job.rpartition("/")[0].rpartition("/") if job.count("/") == 2 else ("", "", job)
    return f'dataloaderjob_namespace="{_escaped(namespace)}",dataloaderjob_name="{_escaped(name)}"'


def _escaped(value: str) -> str:
    """The value of a label; what a trainer calls itself may have any character."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
