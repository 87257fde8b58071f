"""The data of a report: readings of a run over time, and its events. Pure.

A file of a run has one JSON object on each line: `about` first, then readings and events as they occur.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dataloaderjob.core.errors import InputError

EVERY_S = 1.0
"""Minimum time in seconds between two readings."""
MOST_READINGS = 800
"""Maximum number of readings. Beyond it, every second reading is dropped."""
MOST_EVENTS = 400
MAX_WHAT = 300
REPORT = "report"
"""Name of the folder with this data. The folder is in the record's folder or, for a run without a record, in the run's
own."""
SERIES_FILE, TIMES_FILE = "series.jsonl", "times.json"


@dataclass(frozen=True, slots=True)
class RankReading:
    """Counts of one rank since the start of the run, and the number of its batches that are ready now."""

    next_calls: int
    wait_ns: int
    step_ns: int
    nbytes: int
    ready: int
    """Number of ready batches; -1 while the rank is not attached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading. `at` is in seconds since the start of the run."""

    at: float
    ranks: Mapping[str, RankReading] = field(default_factory=dict)
    feeders: int = 0
    desired: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counters of the whole run (`core.supervision.COUNTERS`)."""
    cpu: Mapping[str, float] = field(default_factory=dict)
    """CPU seconds since processes were first seen, by role."""

    def pack(self) -> str:
        ranks = {
            rank: [r.next_calls, r.wait_ns, r.step_ns, r.nbytes, r.ready] for rank, r in self.ranks.items()
        }
        cpu = {name: round(seconds, 3) for name, seconds in self.cpu.items()}
        return json.dumps({
            "at": round(self.at, 3), "ranks": ranks, "feeders": self.feeders, "desired": self.desired,
            "counts": dict(self.counts), "cpu": cpu,
        }, separators=(",", ":"))  # fmt: skip

    @staticmethod
    def parse(row: Mapping[str, Any]) -> Reading:
        """Parses a row of a file. Raises ValueError, TypeError or KeyError."""
        desired = row["desired"]
        return Reading(
            at=float(row["at"]),
            ranks={str(rank): RankReading(*map(int, found)) for rank, found in row["ranks"].items()},
            feeders=int(row["feeders"]),
            desired=None if desired is None else int(desired),
            counts={str(name): int(n) for name, n in row["counts"].items()},
            cpu={str(name): float(seconds) for name, seconds in row["cpu"].items()},
        )


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a run. `at` is in seconds since the start of the run."""

    at: float
    who: str
    kind: str
    """The kind of the event, such as STARTED or LOST. Readers may count the events of a kind."""
    what: str
    """The event as text, which may come from user code."""

    def pack(self) -> str:
        return json.dumps({**asdict(self), "at": round(self.at, 3)})


STARTED, LOST, REPLACED, MEMORY, TROUBLE, SCALED, SERVICE, FAILED, ENDED = (
    "started", "lost", "replaced", "out of memory", "trouble", "scaled", "service", "failed", "ended",
)  # fmt: skip


@dataclass(slots=True)
class Series:
    """Readings and events of a run so far, bounded in number."""

    readings: list[Reading] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    dropped_events: int = 0
    every_s: float = EVERY_S

    def is_due(self, at: float) -> bool:
        """Returns True if it is time for another reading."""
        return not self.readings or at - self.readings[-1].at >= self.every_s - 0.05

    def add(self, reading: Reading) -> bool:
        """Adds a reading. Returns True if earlier readings were dropped. Counts are totals, so dropping readings lowers
        only the resolution."""
        self.readings.append(reading)
        if len(self.readings) <= MOST_READINGS:
            return False
        self.readings = self.readings[-1::-2][::-1]  # the newest stays
        self.every_s *= 2
        return True

    def tell(self, event: Event) -> bool:
        """Adds an event. Returns False if there are too many."""
        if len(self.events) >= MOST_EVENTS:
            self.dropped_events += 1
            return False
        self.events.append(event)
        return True


def parse(lines: Iterable[str], where: str) -> tuple[dict[str, Any], Series]:
    """Reads a run's file. Returns `about` and the series. The last line may be incomplete. Raises InputError for any
    other defect."""
    about: dict[str, Any] | None = None
    series, broken = Series(), ""
    for number, line in enumerate(lines, 1):
        if broken:
            raise InputError(f"{where} does not contain the readings of a run: {broken}")
        try:
            row = json.loads(line)
            if about is None:
                about = {**row["about"], "started": float(row["about"]["started"])}
            elif "who" in row:
                series.events.append(
                    Event(float(row["at"]), str(row["who"]), str(row["kind"]), str(row["what"]))
                )
            else:
                series.readings.append(Reading.parse(row))
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            broken = f"line {number} cannot be read ({exc})"
    if about is None:
        raise InputError(f"{where} does not contain the readings of a run: {broken or 'it is empty'}")
    return about, series
