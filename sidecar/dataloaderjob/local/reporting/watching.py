"""The data of a report about a job on a cluster, from its supervisor's statuses while a command watches it. Pure.

A cluster keeps no data for a report, so the report covers only the watched time. Counts begin with the first status.
Statuses come from a process in the user's image, so any value that is not a valid count is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataloaderjob.core import costs, measures
from dataloaderjob.core.input_bound import judge
from dataloaderjob.core.supervision import OF_RANK
from dataloaderjob.core.texts import clean
from dataloaderjob.core.timings import Sums, Times
from dataloaderjob.local.reporting import events
from dataloaderjob.local.reporting.series import RankReading, Reading, Series

MOST_RANKS, MAX_NAME = 256, 80
_COUNTED = OF_RANK[:-1]
"""Metrics of a rank that never decrease."""
_OF_SIDECAR = ("retries", "hedges", "failures", "feeders_lost", "receiver_cpu_ns")
Status = Mapping[str, Any]


class Watched:
    """The collector of a watch, which adds up the increase in all counts since the first status."""

    def __init__(self) -> None:
        self.series = Series()
        self._before: Status = {}
        self._last: dict[tuple[str, str], dict[str, int]] = {}
        """The last counts of each source. A source is identified by a kind and a name."""
        self._rise: dict[tuple[str, str], dict[str, int]] = {}
        self._slots = 0

    def see(self, at: float, status: Status) -> None:
        """Processes a status. The status is empty if the supervisor did not answer."""
        if not status:
            return
        if self._before:
            for event in events.found(at, self._before, status):
                self.series.tell(event)
        ready = self._add(status)
        self._before = status
        if self.series.is_due(at):
            self.series.add(self._reading(at, status, ready))

    def verdict(self) -> str:
        """Returns the verdict on the last minute, as `dataloaderjob status` shows it for a run; empty if it is
        unknown."""
        found = judge(measures.parse(self._before.get("measures")))
        return "" if found is None else found.sentence()

    def times(self, single: Times | None = None) -> Times:
        """Returns the times of all batches built during the watch, as sums. `single`: the times of individual batches
        since the feeders started; None if unknown."""
        total = {
            name: sum(rise.get(name, 0) for rise in self._of("feeder").values()) for name in costs.COUNTERS
        }
        taken = self._total()
        nbytes = taken.get("nbytes", 0) // max(1, taken.get("next_calls", 0))
        sums = Sums(
            count=total["built"], nbytes=nbytes * total["built"], wall_ns=total["wall_ns"], slots=self._slots,
            cpu_ns=total["samples_ns"] + total["collate_ns"] + total["encode_ns"], queued_ns=total["queued_ns"],
            squares=total["wall_us2"] / 1e12,
        )  # fmt: skip
        single = single or Times()
        return Times(sums, single.buckets, single.batches, single.samples)

    def _add(self, status: Status) -> dict[str, int]:
        """Adds up the counts of a status. Returns the number of ready batches of each rank."""
        is_first, ready = not self._before, dict[str, int]()
        for sidecar, report in _mapping(status.get("sidecars")).items():
            name = clean(sidecar, MAX_NAME)
            metrics, ranks = (
                _mapping(_mapping(report).get("metrics")),
                _mapping(_mapping(report).get("ranks")),
            )
            self._count(
                "sidecar", name, {key: _whole(metrics.get(key)) for key in _OF_SIDECAR}, is_first=is_first
            )
            if not ranks:  # a sidecar of an earlier release
                ranks = {name: [metrics.get(key) for key in OF_RANK]}
            for rank, values in ranks.items():
                row = (
                    values if isinstance(values, list) and len(values) == len(OF_RANK) else [0] * len(OF_RANK)
                )
                counts = dict(zip(OF_RANK, map(_whole, row), strict=True))
                label = self._label(clean(rank, MAX_NAME), name)
                ready[label] = counts.pop("ready")
                if len(self._of("rank")) < MOST_RANKS or ("rank", f"{name}/{label}") in self._rise:
                    self._count("rank", f"{name}/{label}", counts, is_first=is_first)
        for feeder in status.get("feeders", ()):
            found = costs.parse(feeder.get("costs"))
            self._slots = max(self._slots, found.pop(costs.SLOTS))
            self._count("feeder", str(feeder.get("name")), found, is_first=is_first)
        return ready

    def _label(self, rank: str, sidecar: str) -> str:
        """Returns a label for the rank. The label includes the name of the rank's sidecar if another sidecar has the
        same rank."""
        theirs = any(name.endswith(f"/{rank}") and name != f"{sidecar}/{rank}" for name in self._of("rank"))
        return f"{rank} of {sidecar}" if theirs else rank

    def _count(self, kind: str, name: str, now: dict[str, int], *, is_first: bool) -> None:
        """Adds the increase in a source's counts since the last status. The counts of a new process begin at 0."""
        source = kind, name
        before = self._last.get(source, now if is_first else {})
        rise = self._rise.setdefault(source, {})
        for key, count in now.items():
            was = before.get(key, 0)
            rise[key] = rise.get(key, 0) + (count - was if count >= was else count)
        self._last[source] = now

    def _of(self, kind: str) -> dict[str, dict[str, int]]:
        return {name: rise for (found, name), rise in self._rise.items() if found == kind}

    def _total(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for rise in (*self._of("rank").values(), *self._of("sidecar").values()):
            for key, count in rise.items():
                total[key] = total.get(key, 0) + count
        return total

    def _reading(self, at: float, status: Status, ready: Mapping[str, int]) -> Reading:
        ranks = {}
        for name, rise in self._of("rank").items():
            rank = name.partition("/")[2]
            calls, wait_ns, step_ns, nbytes = (rise[key] for key in _COUNTED)
            ranks[rank] = RankReading(calls, wait_ns, step_ns, nbytes, ready.get(rank, -1))
        cpu = {
            f"receiver of {name}": rise["receiver_cpu_ns"] / 1e9 for name, rise in self._of("sidecar").items()
        }
        for name, rise in self._of("feeder").items():
            cpu[f"{name}, batches"] = (rise["samples_ns"] + rise["collate_ns"] + rise["encode_ns"]) / 1e9
        desired = status.get("desired")
        return Reading(
            at=at, ranks=ranks, feeders=_whole(status.get("ready")),
            desired=desired if type(desired) is int else None, counts=self._total(), cpu=cpu,
        )  # fmt: skip


def _mapping(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _whole(found: object) -> int:
    return found if type(found) is int and 0 <= found < 1 << 63 else 0
