"""Rates from two readings of sidecars' counters."""

from __future__ import annotations

import pytest

from dataloaderjob.core import supervision
from dataloaderjob.core.supervision import COUNTERS, Rates


def reading(**counters: int) -> dict[str, int]:
    return dict.fromkeys(COUNTERS, 0) | counters


def test_rates_and_stall_cover_the_seconds_between_readings():
    before = dict.fromkeys(COUNTERS, 0)
    after = before | {"next_calls": 50, "nbytes": 10**9, "wait_ns": 10**9, "step_ns": 3 * 10**9}
    found = supervision.between({"": before}, {"": after}, 2.0)
    assert found == Rates(batches_per_s=25.0, nbytes_per_s=5e8, stall=0.25)
    assert supervision.between({"": after}, {"": after}, 2.0) == Rates()
    staged = supervision.between({"": before}, {"": after | {"stage_ns": 10**9}}, 2.0)
    assert staged.stage_s == pytest.approx(0.02)


def test_occupancy_covers_all_pools():
    assert supervision.occupancy([]) is None
    found = [{"used_nbytes": 1, "pool_nbytes": 4}, {"used_nbytes": 0, "pool_nbytes": 4}]
    assert supervision.occupancy(found) == 0.125


def test_rates_of_a_job_sum_over_its_sidecars():
    before = {"a": reading(), "b": reading(next_calls=100, nbytes=10**9)}
    after = {
        "a": reading(next_calls=10, nbytes=10**9, wait_ns=3, step_ns=1, used_nbytes=1, pool_nbytes=2),
        "b": reading(next_calls=120, nbytes=3 * 10**9, step_ns=4, used_nbytes=0, pool_nbytes=2),
    }
    assert supervision.between(before, after, 10.0) == Rates(
        batches_per_s=3.0, nbytes_per_s=3e8, stall=3 / 8, occupancy=0.25
    )


def test_new_sidecar_counts_from_its_next_reading_on():
    """Its counters may be of hours: the supervisor was gone, and it was not."""
    old, new = {"a": reading(next_calls=50)}, {"b": reading(next_calls=10**6)}
    assert supervision.between(old, new, 10.0).batches_per_s == 0
    later = {"b": reading(next_calls=10**6 + 40)}
    assert supervision.between(new, later, 10.0).batches_per_s == 4


def test_decreasing_counters_give_no_rate():
    assert supervision.between({"a": reading(next_calls=9)}, {"a": reading(next_calls=2)}, 1.0) == Rates()
