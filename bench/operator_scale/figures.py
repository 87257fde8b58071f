"""Figures from the operator's metrics and from the statuses that it wrote. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.stats import percentile

PREFIX = "dataloaderjob_operator_"
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""Maps a name, and labels in the order of their names, to the value."""
STATUS = "DataLoaderJob apply_status"


def parse_metrics(text: str) -> Samples:
    """Parses Prometheus' text format. Raises ValueError for an invalid line."""
    found = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if (match := _LINE.match(line)) is None:
            raise ValueError(f"a sample of Prometheus' text format was expected, found {line!r}")
        name, labels, value = match.groups()
        found[name, tuple(sorted(_LABEL.findall(labels or "")))] = float(value)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The operator's counters at one moment."""

    at: float
    """Seconds of the monotonic clock."""
    cpu_s: float
    peak_nbytes: int
    """Peak resident memory."""
    reconciles: float = 0.0
    errors: float = 0.0
    queue_depth: float = 0.0
    lag_s: float = 0.0
    queued_s: float = 0.0
    """Total time that jobs waited for a reconcile."""
    looking_s: float = 0.0
    """Total time of reconciles, writes included."""
    writes: Mapping[str, float]
    """Number of writes by kind and verb."""


def reading(samples: Samples, *, at: float, cpu_s: float, peak_nbytes: int) -> Reading:
    def total(name: str) -> float:
        return sum(value for (found, _), value in samples.items() if found == PREFIX + name)

    writes = {
        " ".join(dict(labels)[label] for label in ("kind", "verb")): value
        for (name, labels), value in samples.items()
        if name == f"{PREFIX}api_writes_total"
    }
    return Reading(
        at=at, cpu_s=cpu_s, peak_nbytes=peak_nbytes, reconciles=total("reconciles_total"),
        errors=total("reconcile_errors_total"), queue_depth=total("queue_depth"), lag_s=total("loop_lag_seconds"),
        queued_s=total("queue_latency_seconds_sum"), looking_s=total("reconcile_duration_seconds_sum"), writes=writes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Between:
    """The operator's work between two readings."""

    wall_s: float
    cpu_s: float
    reconciles: float
    errors: float
    queued_s: float
    """Mean time from when a job was due until its reconcile."""
    looking_s: float
    """Mean time of a reconcile, with its writes."""
    writes: dict[str, float]

    @property
    def written(self) -> float:
        return sum(self.writes.values())


def between(before: Reading, after: Reading) -> Between:
    rise = {kind: count - before.writes.get(kind, 0.0) for kind, count in sorted(after.writes.items())}
    looks = after.reconciles - before.reconciles
    return Between(
        wall_s=after.at - before.at, cpu_s=after.cpu_s - before.cpu_s, reconciles=looks,
        errors=after.errors - before.errors, queued_s=(after.queued_s - before.queued_s) / max(1.0, looks),
        looking_s=(after.looking_s - before.looking_s) / max(1.0, looks),
        writes={kind: count for kind, count in rise.items() if count},
    )  # fmt: skip


def what_changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Returns why a status was written: the first that applies of "generation", "phase", "conditions", "feeders.ready",
    "pod counts", "figures", "ray", "other". The result is empty if nothing changed."""
    if old == new:
        return ""
    if old.get("observedGeneration") != new.get("observedGeneration"):
        return "generation"
    if old.get("phase") != new.get("phase"):
        return "phase"
    if _facts(old) != _facts(new):
        return "conditions"
    if _at(old, "feeders", "ready") != _at(new, "feeders", "ready"):
        return "feeders.ready"
    for part, name in (
        ("feeders", "pod counts"),
        ("trainers", "pod counts"),
        ("loader", "figures"),
        ("ray", "ray"),
    ):
        if old.get(part) != new.get(part):
            return name
    return "other"


def _facts(status: Mapping[str, Any]) -> Counter[tuple[str, str, str, str]]:
    """Returns the conditions without their times and generations."""
    return Counter(
        (c["type"], c["status"], c["reason"], c.get("message", "")) for c in status.get("conditions") or ()
    )


def _at(status: Mapping[str, Any], part: str, field: str) -> Any:
    return (status.get(part) or {}).get(field)


def spread(values: list[float]) -> dict[str, float]:
    """Returns p50, p99 and max."""
    return {"p50_s": percentile(values, 0.5), "p99_s": percentile(values, 0.99), "max_s": max(values)}
