"""What a supervisor keeps of its sidecars' words."""

from __future__ import annotations

from typing import Any

from dataloaderjob.supervisor.reports import MAX_FAILURES, MAX_TEXT, Reports

MISSING = {"rank": "0", "feeder": "feeder-1", "reason": "ModuleMissing", "text": "No module named 'x'"}


def figures(taken: int, *failures: Any) -> dict[str, Any]:
    return {"type": "figures", "figures": {"next_calls": taken}, "rings": 1, "failures": list(failures)}


def test_figures_are_those_of_the_last_message_until_the_sidecar_goes():
    ledger = Reports()
    ledger.heard("a", figures(3))
    ledger.heard("a", figures(4))
    assert ledger.sidecars == {"a": {"figures": {"next_calls": 4}, "rings": 1}}
    ledger.gone("a")
    assert ledger.sidecars == {}


def test_a_failure_stands_until_its_sidecar_takes_it_back():
    ledger = Reports()
    ledger.heard("a", figures(0, MISSING))
    assert ledger.failures() == [{"sidecar": "a", **MISSING}]
    ledger.heard("b", figures(9))
    assert ledger.failures(), "another trainer's batches are no cure for this one"
    ledger.heard("a", figures(1))
    assert ledger.failures() == []


def test_a_failure_outlives_its_sidecar_until_a_trainer_takes_a_batch():
    ledger = Reports()
    ledger.heard("a", figures(0, MISSING))
    ledger.gone("a")
    ledger.heard("b", figures(0))
    assert ledger.failures() == [{"sidecar": "a", **MISSING}], "the next attempt starts"
    ledger.heard("b", figures(1))
    assert ledger.failures() == []


def test_a_sidecar_that_comes_back_speaks_for_itself():
    ledger = Reports()
    ledger.heard("a", figures(5, MISSING))
    ledger.gone("a")
    ledger.heard("a", figures(5, MISSING))
    assert ledger.failures() == [{"sidecar": "a", **MISSING}], "once"
    ledger.heard("a", figures(5))
    assert ledger.failures() == []


def test_batches_that_were_taken_before_are_no_cure():
    ledger = Reports()
    ledger.heard("b", figures(9))
    ledger.heard("a", figures(0, MISSING))
    ledger.gone("a")
    ledger.heard("b", figures(9))
    assert ledger.failures()
    ledger.heard("b", figures(12, MISSING | {"feeder": "feeder-2"}))
    assert len(ledger.failures()) == 2
    ledger.heard("b", figures(12))
    assert ledger.failures() == [], "it failed, and went on"


def test_what_a_sidecar_says_is_bounded_and_need_not_make_sense():
    ledger = Reports()
    ledger.heard("a", {"type": "figures", "failures": [7, {"text": "x" * 10_000}] * 50, "figures": 3})
    assert len(ledger.failures()) == MAX_FAILURES
    assert max(len(f["text"]) for f in ledger.failures()) == MAX_TEXT
    for n in range(100):
        ledger.heard(f"s{n}", figures(0, MISSING))
        ledger.gone(f"s{n}")
    assert len(ledger.failures()) == MAX_FAILURES


def test_a_sidecar_that_is_new_here_is_no_cure_for_what_was_before():
    ledger = Reports()
    ledger.heard("a", figures(0, MISSING))
    ledger.gone("a")
    ledger.heard("b", figures(40))
    assert ledger.failures(), "its batches may be older than the failure"
    ledger.heard("b", figures(41))
    assert ledger.failures() == []
