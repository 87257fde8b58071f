"""The model behind advice: limits, numbers of feeders, predicted rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core.sizing import (
    HEADROOM,
    MOST_SPREAD,
    Limit,
    Pipeline,
    advise,
    ceilings,
    rate,
    spread,
)

TIMES = st.floats(1e-4, 10)


def pipeline(**changed: object) -> Pipeline:
    """A rank that waits for three quarters of each step, for batches of 0.4 CPU-s."""
    usual = {"period_s": 0.4, "step_s": 0.1, "cpu_s": 0.4, "wall_s": 0.4, "nbytes": 10_000_000}
    return Pipeline(**{**usual, **changed})  # type: ignore[arg-type]


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    step = draw(TIMES)
    return Pipeline(
        period_s=step * draw(st.floats(1, 50)), step_s=step, cpu_s=draw(TIMES), wall_s=draw(TIMES),
        nbytes=draw(st.integers(0, 10**9)), spread=draw(st.floats(0, 5)), ranks=draw(st.integers(1, 64)),
        slots=draw(st.none() | st.integers(1, 64)), link=draw(st.none() | st.floats(1e6, 1e11)),
    )  # fmt: skip


def test_feeders_make_as_many_batches_as_a_step_takes_with_headroom() -> None:
    found = advise(pipeline())
    assert found.feeders == math.ceil(10 * 0.4 / HEADROOM) == 5
    assert (found.limit, found.next_limit) == (Limit.CPU, Limit.TRAINER)
    assert found.gain == pytest.approx(4.0)
    assert found.cpus == pytest.approx(4.0)
    assert found.link == pytest.approx(1e8)


def test_batches_that_differ_get_more_headroom() -> None:
    even, uneven = advise(pipeline()), advise(pipeline(spread=3.0))
    assert uneven.feeders == math.ceil(10 * 0.4 / (HEADROOM - MOST_SPREAD)) > even.feeders


@pytest.mark.parametrize(
    ("changed", "limit", "next_limit"),
    [
        pytest.param({"cpu_s": 0.01}, Limit.STORAGE, Limit.TRAINER, id="storage"),
        pytest.param({"link": 8e7}, Limit.CPU, Limit.NETWORK, id="network-next"),
        pytest.param({"link": 2.8e7}, Limit.NETWORK, Limit.NETWORK, id="network-now"),
        pytest.param({"nbytes": 3 * 10**9, "step_s": 0.05}, Limit.CPU, Limit.RECEIVER, id="receiver-next"),
        pytest.param({"slots": 2, "period_s": 0.5}, Limit.CPU, Limit.SLOTS, id="slots-next"),
        pytest.param({"period_s": 0.102}, Limit.TRAINER, Limit.TRAINER, id="nothing-to-gain"),
    ],
)
def test_the_lowest_bound_is_the_limit(changed: dict[str, object], limit: Limit, next_limit: Limit) -> None:
    changed = {"nbytes": 10_000_000, **changed}
    if limit is not Limit.TRAINER and "period_s" not in changed:
        changed["period_s"] = 1.2 if "receiver" in str(next_limit) else 0.4
    found = advise(pipeline(**changed))
    assert (found.limit, found.next_limit) == (limit, next_limit)


def test_a_rank_that_hardly_waits_needs_no_feeders() -> None:
    found = advise(pipeline(period_s=0.102))
    assert (found.feeders, found.gain, found.cpus) == (0, 1.0, 0.0)


def test_a_full_link_needs_no_feeders_and_is_named() -> None:
    found = advise(pipeline(link=2.0e7))
    assert (found.feeders, found.limit) == (0, Limit.NETWORK)


def test_a_bound_on_feeders_lowers_the_gain() -> None:
    found = advise(pipeline(), most=2)
    assert found.feeders == 2
    assert found.gain == pytest.approx(2.0)
    assert found.one_more == pytest.approx(1.5)


def test_an_iterable_dataset_needs_no_more_feeders_than_slots() -> None:
    found = advise(pipeline(slots=2, period_s=0.8))
    assert (found.feeders, found.next_limit) == (2, Limit.SLOTS)


@given(pipelines(), st.integers(1, 200))
def test_more_feeders_never_lower_the_rate_nor_pass_a_ceiling(one: Pipeline, feeders: int) -> None:
    assert rate(one, feeders) <= rate(one, feeders + 1) <= min(ceilings(one).values())


@given(pipelines())
def test_advised_feeders_suffice_and_none_is_wasted(one: Pipeline) -> None:
    found = advise(one)
    assert found.gain >= 1.0
    if found.feeders:
        reached = min(ceilings(one).values())
        assert rate(one, found.feeders) == pytest.approx(reached)
        busy = reached * one.occupied_s
        assert found.feeders <= busy / (HEADROOM - MOST_SPREAD) + 1


@pytest.mark.parametrize("changed", [{"period_s": 0}, {"wall_s": 0}, {"step_s": -1}, {"nbytes": -1}])
def test_times_that_cannot_be_are_rejected(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="times must be positive"):
        pipeline(**changed)


def test_spread_is_the_coefficient_of_variation() -> None:
    assert spread([1.0]) == spread([2.0, 2.0]) == 0.0
    assert spread([1.0, 3.0]) == pytest.approx(math.sqrt(2) / 2)


def test_a_slow_batch_of_each_window_bounds_the_rate_in_order() -> None:
    even, tail = pipeline(step_s=0.001), pipeline(step_s=0.001, longest_s=4.0)
    assert rate(even, 8) == pytest.approx(20.0)
    assert rate(tail, 8) == pytest.approx(16 / 4.0)
    assert rate(tail, 16) == pytest.approx(32 / 4.0), "the window grows with the feeders"
    assert rate(pipeline(step_s=0.001, longest_s=0.4), 8) == rate(even, 8)
