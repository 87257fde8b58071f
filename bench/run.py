"""Runs the benchmarks: `python -m bench.run [--full] [--only B1,B2] [--rounds N] [--smoke]`.

Each round runs every cell once, in a process of its own. Ours and the peers are interleaved, in the reverse order every
other round. A round during which other processes took more than 10% of the CPU is repeated, as long as REDO_BUDGET_S
lasts. Results are written to bench/results/*.json; bench/report.py makes the table from them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench import machine, plan, report  # noqa: E402
from bench.plan import Cell  # noqa: E402
from bench.processes import run_cell  # noqa: E402
from bench.rows import MISSING, collect, row  # noqa: E402
from bench.stats import abba  # noqa: E402

RESULTS = ROOT / "bench" / "results"
SMOKE_RESULTS = ROOT / "build" / "bench-smoke"
REDO_BUDGET_S = 60.0
"""Time for repeated rounds of one benchmark, which keeps every benchmark below 30 minutes."""


class Run:
    """One benchmark: rounds of cells, and their reports."""

    def __init__(self, benchmark: str, cells: list[Cell], *, redo: bool) -> None:
        self.benchmark = benchmark
        self._cells = cells
        self._redo_left_s = REDO_BUDGET_S if redo else 0.0
        self._given_up: dict[str, str] = {}
        self.reports: list[dict[str, Any]] = []
        self.failures = 0
        self.redone = 0

    def rounds(self) -> None:
        total = max(cell.rounds for cell in self._cells)
        number = 0
        while number < total:
            start = time.monotonic()
            made = list(self._round(number, total))
            took_s = time.monotonic() - start
            if took_s <= self._redo_left_s and any(r["load"]["disturbed"] for r in made):
                self._redo_left_s -= took_s
                self.redone += 1
                say(f"{self.benchmark} round {number + 1} was disturbed by other processes: run again")
                continue
            self.reports += made
            number += 1
        _same_bytes(self.reports)

    def _round(self, number: int, total: int) -> Iterable[dict[str, Any]]:
        cells = abba([c for c in self._cells if number < c.rounds], number)
        for place, cell in enumerate(cells, 1):
            at = f"{cell.benchmark.split()[0]} round {number + 1}/{total} cell {place:>2}/{len(cells)}"
            if f"{cell.benchmark} {cell.party}" in self._given_up:
                continue
            made = run_cell(cell)
            if "missing" in made:
                self._given_up[f"{cell.benchmark} {cell.party}"] = made["missing"]
                say(f"{at}: {cell.label}: MISSING: {made['missing']}")
                continue
            if "failed" in made:
                self.failures += 1
                say(f"{at}: {cell.label}: FAILED\n{made['failed']}")
                continue
            left = f", had to end {', '.join(made['left'])}" if made["left"] else ""
            foreign = made["load"]["foreign_share"]
            say(f"{at}: {cell.label}: {made['wall_s']:.1f} s, foreign CPU {foreign:.0%}{left}")
            yield {"party": cell.party, "round": number, "cell": cell.label, "case": cell.case, **made}

    def keep(self) -> None:
        """Writes the cells' reports if no rows can be made from them."""
        SMOKE_RESULTS.mkdir(parents=True, exist_ok=True)
        path = SMOKE_RESULTS / f"{plan.FILES[self.benchmark]}-cells.json"
        path.write_text(json.dumps(self.reports, indent=1) + "\n")
        say(f"{self.benchmark}: no rows can be made; the cells' reports are in {path.relative_to(ROOT)}")

    def as_json(self, *, full: bool) -> dict[str, Any]:
        figures = collect(self.reports)
        rows = [row(claim, figures) for claim in plan.claims(self.benchmark, full=full)]
        loads = [r["load"] for r in self.reports]
        return {
            "benchmark": self.benchmark,
            "title": plan.TITLES[self.benchmark],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": machine.commit(),
            **machine.facts(),
            "full": full,
            "load": {
                "load1_max": max((x["load1"] for x in loads), default=0.0),
                "foreign_share_max": max((x["foreign_share"] for x in loads), default=0.0),
                "steal_share_max": max((x["steal_share"] for x in loads), default=0.0),
                "disturbed_cells": sum(x["disturbed"] for x in loads),
                "rounds_run_again": self.redone,
            },
            "missing": self._given_up,
            "failed_cells": self.failures,
            "rows": rows,
            "cells": self.reports,
        }


def _same_bytes(reports: list[dict[str, Any]]) -> None:
    """Raises RuntimeError if two parties verified the same number of batches of a case and the bytes differ."""
    digests: dict[tuple[str, int], tuple[str, str]] = {}
    for made in reports:
        proof = made["proof"]
        key = (json.dumps(made["case"], sort_keys=True), proof["batches"])
        digest, cell = digests.setdefault(key, (proof["digest"], made["cell"]))
        if digest != proof["digest"]:
            raise RuntimeError(
                f"{cell} and {made['cell']} did not deliver the same bytes: {digest}, {proof['digest']}"
            )


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="the whole grid; takes hours")
    parser.add_argument("--only", default=",".join(plan.TITLES), help="benchmarks, comma separated")
    parser.add_argument("--parties", default="", help="run only parties whose name contains this")
    parser.add_argument("--rounds", type=int, help="most rounds, instead of 5 or 7")
    parser.add_argument("--smoke", action="store_true", help="one short round, results to build/bench-smoke")
    options = parser.parse_args(arguments)
    machine.adopt_orphans()
    out = SMOKE_RESULTS if options.smoke else RESULTS
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    bad = 0
    for benchmark in options.only.split(","):
        if benchmark not in plan.TITLES:
            parser.error(f"there is no benchmark {benchmark!r}, only {', '.join(plan.TITLES)}")
        cells = plan.cells(benchmark, full=options.full, smoke=options.smoke)
        if options.rounds:
            cells = [replace(c, rounds=min(c.rounds, options.rounds)) for c in cells]
        cells = [c for c in cells if options.parties in c.party]
        say(f"{benchmark}: {plan.TITLES[benchmark]}: {len(cells)} cells a round")
        run = Run(benchmark, cells, redo=not options.smoke)
        try:
            run.rounds()
            found = run.as_json(full=options.full)
        except Exception:
            run.keep()
            raise
        (out / f"{plan.FILES[benchmark]}.json").write_text(json.dumps(found, indent=1) + "\n")
        bad += run.failures + _tell(found["rows"])
    say(f"done in {(time.monotonic() - start) / 60:.1f} minutes; results in {out.relative_to(ROOT)}")
    if not options.smoke:
        report.main([])
    return 1 if bad else 0


def _tell(rows: list[dict[str, Any]]) -> int:
    """Prints the promises. Returns the number of floors that do not hold or were not measured."""
    broken = 0
    for made in rows:
        if made["met"] is None or (made["target"] is None and made["floor"] is None):
            continue
        broken += made["floor"] is not None and made["met"] in ("no", MISSING)
        case = f"{made['benchmark']} {made['case']}{report.against(made)}"
        say(f"  {made['met']:>7}  {case}: {report.figure_text(made)}")
    return broken


if __name__ == "__main__":
    sys.exit(main())
