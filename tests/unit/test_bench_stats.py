"""Statistics of the benchmarks: ratios, intervals, verdicts, rows. Pure."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import plan, rows, stats

positive = st.floats(min_value=1e-6, max_value=1e9)


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        pytest.param(0.0, 1.0, id="least"),
        pytest.param(0.5, 2.5, id="between-two-ranks"),
        pytest.param(1.0, 4.0, id="greatest"),
        pytest.param(0.99, 3.97, id="p99"),
    ],
)
def test_percentile_is_linear_between_ranks(q: float, expected: float) -> None:
    assert stats.percentile([4.0, 1.0, 3.0, 2.0], q) == pytest.approx(expected)


def test_percentile_of_no_values_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        stats.percentile([], 0.5)


def test_percentile_beyond_one_is_refused() -> None:
    with pytest.raises(ValueError, match="found 99"):
        stats.percentile([1.0], 99)


@given(st.lists(positive, min_size=1, max_size=12))
def test_interval_holds_the_median_and_lies_within_the_values(values: list[float]) -> None:
    found = stats.bootstrap(values, resamples=200)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_bootstrap_is_deterministic() -> None:
    values = [1.0, 3.0, 2.0, 5.0, 4.0]
    assert stats.bootstrap(values) == stats.bootstrap(values)


def test_bootstrap_leaves_the_global_random_state_alone() -> None:
    random.seed(1)
    before = random.getstate()
    stats.bootstrap([1.0, 2.0, 3.0])
    assert random.getstate() == before


def test_interval_of_equal_rounds_has_no_width() -> None:
    assert stats.bootstrap([7.0] * 5) == stats.Interval(7.0, 7.0, 7.0)


def test_ratio_above_one_is_a_win_for_costs_and_for_rates() -> None:
    ours, peer = {0: 2.0}, {0: 10.0}
    assert stats.paired_ratios(ours, peer, lower_is_better=True) == [5.0]
    assert stats.paired_ratios(ours, peer, lower_is_better=False) == [0.2]


def test_only_rounds_of_both_sides_are_paired() -> None:
    assert stats.paired_ratios({0: 1.0, 1: 2.0, 2: 4.0}, {1: 4.0, 2: 4.0, 3: 9.0}, lower_is_better=True) == [
        2.0,
        1.0,
    ]


def test_a_figure_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="round 3: figures must be above 0"):
        stats.paired_ratios({3: 0.0}, {3: 1.0}, lower_is_better=True)


def test_drift_that_hits_both_sides_alike_does_not_move_the_ratio() -> None:
    ours = {i: 10.0 * (1 + i) for i in range(7)}
    peer = {i: 250.0 * (1 + i) for i in range(7)}
    assert stats.bootstrap(stats.paired_ratios(ours, peer, lower_is_better=True)) == stats.Interval(
        25.0, 25.0, 25.0
    )


@pytest.mark.parametrize(
    ("worst", "floor", "target", "lower", "expected"),
    [
        pytest.param(26.0, 10.0, 25.0, False, "target", id="above-target"),
        pytest.param(25.0, 10.0, 25.0, False, "target", id="at-target"),
        pytest.param(12.0, 10.0, 25.0, False, "floor", id="between"),
        pytest.param(9.9, 10.0, 25.0, False, "no", id="below-floor"),
        pytest.param(5.0, None, 8.0, False, "no", id="target-alone-missed"),
        pytest.param(0.19, 0.3, 0.2, True, "target", id="cost-below-target"),
        pytest.param(0.25, 0.3, 0.2, True, "floor", id="cost-between"),
        pytest.param(0.31, 0.3, 0.2, True, "no", id="cost-above-floor"),
        pytest.param(1.0, None, None, True, None, id="nothing-promised"),
    ],
)
def test_verdict_is_the_goal_that_the_worse_end_still_meets(
    worst: float, floor: float | None, target: float | None, lower: bool, expected: str | None
) -> None:
    assert stats.verdict(worst, floor=floor, target=target, lower_is_better=lower) == expected


def test_every_second_round_runs_in_reverse_order() -> None:
    assert [stats.abba("ABC", i) for i in range(3)] == [list("ABC"), list("CBA"), list("ABC")]


def claim(**changes: object) -> plan.Claim:
    base = {
        "benchmark": "B1",
        "case": "c",
        "figure": "cpu_us",
        "unit": "µs",
        "peer": "p",
        "floor": 10.0,
        "target": 25.0,
    }
    return plan.Claim(**{**base, **changes})  # type: ignore[arg-type]


def cells(**by_party: list[float]) -> list[dict[str, object]]:
    return [
        {"party": party, "round": i, "figures": {"c": {"cpu_us": value}}}
        for party, values in by_party.items()
        for i, value in enumerate(values)
    ]


def test_row_is_judged_by_the_worse_end_of_its_interval() -> None:
    found = rows.row(claim(), rows.collect(cells(ours=[10, 10, 10, 10, 10], p=[300, 300, 120, 300, 120])))
    assert found["ratio"] == 30.0
    assert found["ratio_low"] == 12.0
    assert found["met"] == "floor"


def test_unmeasured_figure_is_missing_and_never_a_number() -> None:
    found = rows.row(claim(), rows.collect(cells(p=[300, 300])))
    assert (found["ours"], found["ratio"], found["met"]) == (None, None, "missing")
    assert found["peer"] == 300


def test_a_peer_that_failed_is_missing_too() -> None:
    assert rows.row(claim(), rows.collect(cells(ours=[10, 10])))["met"] == "missing"


def test_claim_without_a_peer_is_about_our_own_figure() -> None:
    found = rows.row(
        claim(peer=None, floor=None, target=20.0), rows.collect(cells(ours=[18, 19, 18, 25, 18]))
    )
    assert found["ours"] == 18
    assert found["ours_high"] == 25
    assert found["met"] == "no"


def test_best_peer_is_the_one_with_the_best_median() -> None:
    figures = rows.collect(cells(ours=[10, 10], slow=[50, 50], fast=[20, 20]))
    found = rows.row(claim(peer=plan.BEST_PEER, floor=None, target=None), figures)
    assert found["peer_name"] == "best peer (fast)"
    assert found["ratio"] == 2.0


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("benchmark", plan.TITLES)
def test_every_party_that_a_claim_names_has_a_cell(benchmark: str, full: bool) -> None:
    parties = {cell.party for cell in plan.cells(benchmark, full=full, smoke=False)}
    named = {c.peer for c in plan.claims(benchmark, full=full)} - {None, plan.BEST_PEER}
    assert named <= parties
    assert "ours" in parties


def test_claims_with_a_floor_run_seven_rounds_and_others_five() -> None:
    rounds = {
        (c.benchmark, c.party): c.rounds for b in plan.TITLES for c in plan.cells(b, full=False, smoke=False)
    }
    assert (
        rounds["B1", "ours"]
        == rounds["B1", plan.DATALOADER_FD]
        == rounds["B2", "ours"]
        == rounds["B3", "ours"]
        == 7
    )
    assert rounds["B1", plan.SPDL] == rounds["B7", "ours"] == 5
