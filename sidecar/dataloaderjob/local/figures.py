"""Figures of a run: what two readings of the sidecar's counters say, and how they are shown. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dataloaderjob.core.rates import COUNTERS, Rates, over


@dataclass(slots=True)
class Meter:
    """Counters over the whole run. A sidecar that was started again counts from nothing again."""

    total: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    _last: dict[str, int] = field(default_factory=dict)

    def read(self, status: Mapping[str, Any]) -> None:
        """Takes a sidecar's status; an empty one says nothing."""
        if "totals" not in status:
            return
        totals = status["totals"]
        for name in COUNTERS:
            now, before = int(totals.get(name, 0)), self._last.get(name, 0)
            self.total[name] += now - before if now >= before else now
            self._last[name] = now


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures(Rates):
    """The loader over some seconds, and its feeders."""

    ready: int
    desired: int


def line(figures: Figures) -> str:
    """`12.3 batches/s, 0.47 GB/s, stall 3.1 %, rings 45 % full, feeders 2/2`"""
    stall = "-" if figures.stall is None else f"{100 * figures.stall:.1f} %"
    full = "-" if figures.occupancy is None else f"{100 * figures.occupancy:.0f} % full"
    return (
        f"{figures.batches_per_s:.1f} batches/s, {figures.nbytes_per_s / 1e9:.3f} GB/s, stall {stall}, "
        f"rings {full}, feeders {figures.ready}/{figures.desired}"
    )


def summary(total: Mapping[str, int], seconds: float, restarts: int) -> str:
    """One line at the end."""
    _, _, stall = over(dict.fromkeys(COUNTERS, 0), total, seconds)
    parts = [
        f"{total['next_calls']} batches", f"{total['nbytes'] / 1e9:.3f} GB", f"{seconds:.1f} s",
        f"stall {'-' if stall is None else f'{100 * stall:.1f} %'}",
    ]  # fmt: skip
    for name, text in (
        ("reasks", "asked again"),
        ("hedges", "hedged"),
        ("late_copies", "late copies"),
        ("failures", "failed"),
        ("feeders_lost", "links to feeders lost"),
        ("copies", "served as copies"),
    ):
        if total[name]:
            parts.append(f"{total[name]} {text}")
    if restarts:
        parts.append(f"{restarts} restarts of parts of the service")
    return ", ".join(parts)
