"""What a supervisor keeps of its sidecars' words."""

from __future__ import annotations

from typing import Any

from dataloaderjob.supervisor.reports import MAX_FAILURE_TEXT, MAX_FAILURES, Reports

MISSING = {"rank": "0", "feeder": "feeder-1", "reason": "ModuleMissing", "text": "No module named 'x'"}


def metrics(taken: int, *failures: Any) -> dict[str, Any]:
    return {"type": "metrics", "metrics": {"next_calls": taken}, "receivers": 1, "failures": list(failures)}


def test_metrics_are_those_of_the_last_message_until_the_sidecar_leaves():
    reports = Reports()
    reports.add("a", metrics(3))
    reports.add("a", metrics(4))
    assert reports.sidecars == {"a": {"metrics": {"next_calls": 4}, "receivers": 1}}
    reports.gone("a")
    assert reports.sidecars == {}


def test_failure_stands_until_its_sidecar_withdraws_it():
    reports = Reports()
    reports.add("a", metrics(0, MISSING))
    assert reports.failures() == [{"sidecar": "a", **MISSING}]
    reports.add("b", metrics(9))
    assert reports.failures(), "another trainer's batches are no cure for this one"
    reports.add("a", metrics(1))
    assert reports.failures() == []


def test_a_failure_outlives_its_sidecar_until_a_trainer_takes_a_batch():
    reports = Reports()
    reports.add("a", metrics(0, MISSING))
    reports.gone("a")
    reports.add("b", metrics(0))
    assert reports.failures() == [{"sidecar": "a", **MISSING}], "the next attempt starts"
    reports.add("b", metrics(1))
    assert reports.failures() == []


def test_returning_sidecars_own_report_replaces_its_old_one():
    reports = Reports()
    reports.add("a", metrics(5, MISSING))
    reports.gone("a")
    reports.add("a", metrics(5, MISSING))
    assert reports.failures() == [{"sidecar": "a", **MISSING}], "once"
    reports.add("a", metrics(5))
    assert reports.failures() == []


def test_batches_taken_before_a_failure_do_not_clear_it():
    reports = Reports()
    reports.add("b", metrics(9))
    reports.add("a", metrics(0, MISSING))
    reports.gone("a")
    reports.add("b", metrics(9))
    assert reports.failures()
    reports.add("b", metrics(12, MISSING | {"feeder": "feeder-2"}))
    assert len(reports.failures()) == 2
    reports.add("b", metrics(12))
    assert reports.failures() == [], "it failed, and went on"


def test_sidecar_reports_are_bounded_and_may_be_malformed():
    reports = Reports()
    reports.add("a", {"type": "metrics", "failures": [7, {"text": "x" * 10_000}] * 50, "metrics": 3})
    assert len(reports.failures()) == MAX_FAILURES
    assert max(len(f["text"]) for f in reports.failures()) == MAX_FAILURE_TEXT
    for n in range(100):
        reports.add(f"s{n}", metrics(0, MISSING))
        reports.gone(f"s{n}")
    assert len(reports.failures()) == MAX_FAILURES


def test_first_report_of_a_new_sidecar_does_not_clear_old_failures():
    reports = Reports()
    reports.add("a", metrics(0, MISSING))
    reports.gone("a")
    reports.add("b", metrics(40))
    assert reports.failures(), "its batches may be older than the failure"
    reports.add("b", metrics(41))
    assert reports.failures() == []
