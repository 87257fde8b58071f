"""The rows of B13 and their promises. Pure: a table, judged by `bench.rows`."""

from __future__ import annotations

from typing import Any

from bench.plan import Claim
from bench.rows import OURS, row

BENCHMARK = "B13"
TITLE = "Operator at scale"
FILE = "b13-operator"
MB = 1e6
INTERVAL = ("ours_low", "ours_high")
"""Fields of a row that a single round does not have."""
Figures = dict[str, dict[str, float]]
"""Maps case to figure to value."""

NOTHING, COLD, QUIET, RESYNC, MEMORY = "creation", "cold start", "idle", "resync", "memory"
SCALE, SPEC, BUSY = "a change of feeders.replicas", "a change of deadlines", "a change while metrics change"
CROWDED = f"{SCALE}, at twice the rate"
"""A load above the capacity of two cores on a slow day, API server and controllers included. Then a queue grows, and
its wait says little about the operator. Nothing is promised."""
CHANGES = (SCALE, SPEC, BUSY)
"""Changes, each of other jobs. `CROWDED` changes the first one's jobs again."""
WRITES = {SCALE: 3.0, SPEC: 1.0}
"""Most writes: the status; for SCALE also the Deployment, and the number of feeders for a restarted supervisor."""


def claims() -> list[Claim]:
    """Returns the claims in the table's order."""
    made = [
        _claim(NOTHING, "all_running_s", "s", "from the first create until all jobs run"),
        _claim(NOTHING, "cpu_s", "CPU-s", "the operator's CPU"),
        _claim(COLD, "looked_at_s", "s", "from process start until each job was reconciled once", floor=60.0),
        _claim(COLD, "cpu_s", "CPU-s", "the operator's CPU until then"),
        _claim(COLD, "writes", "writes", "writes, except of metrics", floor=0.0, target=0.0),
        _claim(COLD, "figure_writes", "writes", "writes of metrics"),
    ]
    for case in (SCALE, CROWDED, SPEC, BUSY):
        bounds = {} if case == CROWDED else {"floor": 5.0, "target": 1.0}
        made += [
            _claim(case, "p50_s", "s", "p50 until observedGeneration follows"),
            _claim(case, "p99_s", "s", "p99", **bounds),
            _claim(case, "max_s", "s", "maximum"),
        ]
    for case in (SCALE, SPEC):
        made += [
            _claim(
                case,
                "writes",
                "writes/change",
                "writes until the change is observed and the children match",
                floor=WRITES[case],
            ),
            _claim(case, "later_writes", "writes/change", "later writes: pod counts, readiness, events"),
            _claim(case, "cpu_ms", "CPU-ms/change", "the operator's CPU, minus its CPU when idle"),
        ]
    made += [
        _claim(QUIET, "cpu_share", "share", "share of a core while metrics are steady"),
        _claim(QUIET, "moving_cpu_share", "share", "share of a core while metrics change"),
        _claim(QUIET, "figure_writes_per_s", "writes/s", "writes of metrics while they are steady"),
        _claim(QUIET, "moving_figure_writes_per_s", "writes/s", "writes of metrics while they change"),
        _claim(
            RESYNC,
            "writes",
            "writes",
            "writes in two resyncs of each job, except of metrics",
            floor=0.0,
            target=0.0,
        ),
        _claim(RESYNC, "figure_writes", "writes", "writes of metrics in that time"),
        _claim(RESYNC, "cpu_s_per_1000", "CPU-s", "CPU for 1,000 resyncs, minus the CPU when idle"),
        _claim(MEMORY, "start_mb", "MB", "peak resident memory after the cold start", floor=400.0),
        _claim(MEMORY, "changes_mb", "MB", "peak resident memory after the changes", floor=400.0),
        _claim(MEMORY, "nothing_mb", "MB", "peak resident memory while all jobs were created", floor=400.0),
    ]
    return made


def rows(found: Figures) -> list[dict[str, Any]]:
    """Returns rows like those of the other benchmarks. A figure that was not measured is `missing`."""
    by_round = {
        (OURS, case, name): {0: value} for case, mine in found.items() for name, value in mine.items()
    }
    made = [row(claim, by_round) for claim in claims()]
    return [{key: value for key, value in one.items() if key not in INTERVAL} for one in made]


def _claim(
    case: str, figure: str, unit: str, says: str, *, floor: float | None = None, target: float | None = None
) -> Claim:
    return Claim(
        benchmark=BENCHMARK, case=case, figure=figure, unit=unit, says=says, floor=floor, target=target
    )
