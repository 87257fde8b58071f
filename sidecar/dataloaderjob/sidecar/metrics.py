"""Figures of one ring, in words of the control memfd, and what they are called in Prometheus.

The receiver stores them ten times a second; the parent reads them from its own mapping. So a scrape
never touches the data path.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataloaderjob.core import control
from dataloaderjob.core.control import Control
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher

RECEIVER = (
    "batches", "nbytes", "asks", "reasks", "hedges", "late_copies", "failures", "feeders_lost",
    "drops", "feeders_up", "feeders_suspect", "ready", "lent", "used_nbytes", "ring_nbytes", "total_nbytes",
    "bundle_loads",
)  # fmt: skip
TRAINER = {
    "next_calls": control.W_NEXT_CALLS,
    "ready_calls": control.W_READY_CALLS,
    "wait_ns": control.W_WAIT_NS,
    "step_ns": control.W_STEP_NS,
    "copies": control.W_COPIES,
    "leased_nbytes": control.W_LEASED_NBYTES,
    "streams": control.W_STREAMS,
}
GAUGES = frozenset(
    {
        "feeders_up",
        "feeders_suspect",
        "ready",
        "lent",
        "used_nbytes",
        "ring_nbytes",
        "total_nbytes",
        "bundle_loads",
        "leased_nbytes",
        "streams",
    }
)
HELP = {
    "batches": "Batches received whole",
    "nbytes": "Bytes of batches received",
    "asks": "Tickets given to feeders, repeats included",
    "reasks": "Tickets given to another feeder because one died or fell silent",
    "hedges": "Tickets given to a second feeder because the first is slow",
    "late_copies": "Batches that came when another copy had already won",
    "failures": "Tickets that failed for good",
    "feeders_lost": "Links to feeders that ended",
    "drops": "Ready batches dropped to make room for an awaited one",
    "feeders_up": "Feeders connected",
    "feeders_suspect": "Feeders connected but silent with work to do",
    "ready": "Batches ready and not yet taken",
    "lent": "Batches ready or held by the trainer",
    "used_nbytes": "Bytes of the ring in use",
    "ring_nbytes": "Bytes of the ring",
    "total_nbytes": "Bytes of all shared memory of this ring",
    "bundle_loads": "Times that the feeders connected have loaded user code and data, for all ranks",
    "next_calls": "Batches taken by the trainer",
    "ready_calls": "Batches that were ready when the trainer asked",
    "wait_ns": "Time that the trainer waited in next()",
    "step_ns": "Time between two calls of next()",
    "copies": "Batches served as copies because leases were at their limit",
    "leased_nbytes": "Bytes that the trainer holds",
    "streams": "Live iterators",
}


@dataclass(frozen=True, slots=True)
class RingFigures:
    """All figures of one ring at one moment."""

    rank: str
    values: dict[str, int]


def store(words: Control, machine: Dispatcher) -> None:
    """Writes the receiver's figures."""
    counters, placer = machine.counters, machine.placer
    up = [link for link in machine.links.values() if link.up]
    ready = sum(t.lease is not None for s in machine.streams.values() for t in s.tickets.values())
    values = (
        counters.batches, counters.nbytes, counters.asks, counters.reasks, counters.hedges, counters.late_copies,
        counters.failures, counters.feeders_lost, placer.drops, len(up), sum(x.suspect_since is not None for x in up),
        ready, len(placer.lent), placer.space.used_nbytes, placer.space.ring_nbytes, placer.space.total_nbytes,
        sum(link.bundle_loads for link in up),
    )  # fmt: skip
    words.words[control.W_FEEDERS] = len(up)
    for at, value in enumerate(values, control.W_FIGURES):
        words.words[at] = value


def read(words: Control, rank: str) -> RingFigures:
    values = {name: words.words[at] for at, name in enumerate(RECEIVER, control.W_FIGURES)}
    values |= {name: words.words[at] for name, at in TRAINER.items()}
    return RingFigures(rank, values)


def total(rings: list[RingFigures]) -> dict[str, int]:
    """Sums over rings."""
    names = (*RECEIVER, *TRAINER)
    return {name: sum(ring.values[name] for ring in rings) for name in names}


def prometheus(rings: list[RingFigures], job: str) -> str:
    """The text format; times in seconds, sizes in bytes."""
    lines = []
    for name in (*RECEIVER, *TRAINER):
        gauge = name in GAUGES
        base, scale = name, 1.0
        if name.endswith("_ns"):
            base, scale = name[:-3] + "_seconds", 1e-9
        elif name.endswith("nbytes"):
            base = name.removesuffix("nbytes") + "bytes"
        metric = f"dataloaderjob_sidecar_{base}" + ("" if gauge else "_total")
        lines.append(f"# HELP {metric} {HELP[name]}")
        lines.append(f"# TYPE {metric} {'gauge' if gauge else 'counter'}")
        for ring in rings:
            value = ring.values[name] * scale
            text = f"{value:.9f}" if scale != 1.0 else str(ring.values[name])
            lines.append(f'{metric}{{job="{job}",rank="{ring.rank}"}} {text}')
    return "\n".join(lines) + "\n"
