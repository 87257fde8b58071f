"""What two readings of sidecars' counters say: batches and bytes by the second, waiting, fullness. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COUNTERS = (
    "next_calls", "nbytes", "wait_ns", "step_ns", "retries", "hedges", "late_copies", "failures",
    "feeders_lost", "copies",
)  # fmt: skip
Readings = Mapping[str, Mapping[str, int]]
"""Metrics by sidecar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The loader over some seconds."""

    batches_per_s: float = 0.0
    nbytes_per_s: float = 0.0
    stall: float | None = None
    """Share of the trainers' time that was spent waiting in next(); None while nobody iterates."""
    occupancy: float | None = None
    """Share of the pools in use; None without pools."""


def over(
    before: Mapping[str, int], after: Mapping[str, int], seconds: float
) -> tuple[float, float, float | None]:
    """Batches/s, bytes/s and stall between two totals."""
    wait, step = after["wait_ns"] - before["wait_ns"], after["step_ns"] - before["step_ns"]
    seconds = max(seconds, 1e-9)
    return (
        (after["next_calls"] - before["next_calls"]) / seconds,
        (after["nbytes"] - before["nbytes"]) / seconds,
        wait / (wait + step) if wait + step else None,
    )


def occupancy(pools: Iterable[Mapping[str, Any]]) -> float | None:
    """Of all these pools, or sums of pools."""
    known = [(int(pool.get("used_nbytes", 0)), int(pool.get("pool_nbytes", 0))) for pool in pools]
    size = sum(size for _, size in known)
    return sum(used for used, _ in known) / size if size else None


def between(before: Readings, after: Readings, seconds: float) -> Rates:
    """Of all sidecars together. One that only one reading knows has come or gone meanwhile, and counts from its
    next reading on: how much of its counters is of these seconds nobody knows."""
    both = [name for name in after if name in before]
    rise = {
        counter: sum(max(0, after[n].get(counter, 0) - before[n].get(counter, 0)) for n in both)
        for counter in COUNTERS
    }
    batches, nbytes, stall = over(dict.fromkeys(COUNTERS, 0), rise, seconds)
    return Rates(batches_per_s=batches, nbytes_per_s=nbytes, stall=stall, occupancy=occupancy(after.values()))
