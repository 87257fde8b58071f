"""Results of the benchmarks that run by themselves, in the format of the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bench import report
from bench.run import RESULTS, ROOT, SMOKE_RESULTS, say


def load_of(loads: Sequence[dict[str, Any]], *, again: int = 0) -> dict[str, Any]:
    """Returns the worst load of all cells. `again`: rounds that were run again."""
    return {
        "load1_max": max(x["load1"] for x in loads),
        "foreign_share_max": max(x["foreign_share"] for x in loads),
        "steal_share_max": max(x["steal_share"] for x in loads),
        "disturbed_cells": sum(x["disturbed"] for x in loads),
        "rounds_run_again": again,
    }


def write(found: dict[str, Any], name: str, *, smoke: bool) -> None:
    """Writes the results, and the page from all results. A smaller run writes only its results, elsewhere."""
    out = SMOKE_RESULTS if smoke else RESULTS
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    if not smoke:
        report.main([])
    for row in found["rows"]:
        say(f"{row['case']}: {report.figure_text(row)}{' MISSED' if row['met'] == 'no' else ''}")
    say(f"results in {out.relative_to(ROOT)}")
