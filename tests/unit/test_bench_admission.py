"""The benchmark of admissions: how its records become rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import admission
from bench.admission import BARE_CASE, POLICY_CASE, WEBHOOK_CASE


def record(number: int, case: str, **figures: float) -> dict[str, Any]:
    return {"party": "ours", "round": number, "figures": {case: figures}}


def test_admissions_are_judged_by_the_worst_end_of_their_interval() -> None:
    records = [
        record(number, case, p50_ms=5.0, p99_ms=p99 + number, cpu_ms=2.0)
        for number in range(5)
        for case, p99 in ((WEBHOOK_CASE, 30.0), (POLICY_CASE, 60.0), (BARE_CASE, 90.0))
    ]
    found = {row["case"]: row for row in admission.rows(records)}
    assert found[f"{WEBHOOK_CASE}: p99"]["ours"] == 32.0
    assert [found[f"{case}: p99"]["met"] for case in (WEBHOOK_CASE, POLICY_CASE)] == ["floor", "no"]
    assert found[f"{BARE_CASE}: p99"]["floor"] is None
    assert found[f"{WEBHOOK_CASE}: the injector's CPU"]["unit"] == "CPU-ms/pod"


def test_case_without_records_has_rows_that_say_so() -> None:
    assert {row["met"] for row in admission.rows([])} == {"missing"}
