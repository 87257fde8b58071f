"""Permutations without a list: each index once, orders that look like chance, the same everywhere."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.samplers.permutation import Permutation, make_keys, uniform


def order(n: int, *named: int) -> list[int]:
    return Permutation(n, *(named or (0,)))(np.arange(n)).tolist()


@pytest.mark.parametrize("n", [*range(70), 255, 256, 257, 1000, 4095, 4097, 65_536, 99_999])
def test_each_index_appears_once(n: int) -> None:
    assert sorted(order(n, 7, n)) == list(range(n))


@given(st.integers(1, 3000), st.integers(), st.integers())
def test_each_index_appears_once_for_every_seed_and_epoch(n: int, seed: int, epoch: int) -> None:
    assert sorted(order(n, seed, epoch)) == list(range(n))


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_indices_of_a_large_set_lie_within_it_and_differ(n: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, max(n - 64, 0)))
    found = Permutation(n, seed)(np.arange(start, min(start + 64, n)))
    assert found.min() >= 0
    assert found.max() < n
    assert len(set(found.tolist())) == found.size


@given(st.integers(1, 500), st.data())
def test_block_is_the_same_alone_as_within_the_whole(n: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1)))
    whole = order(n, 3)
    assert Permutation(n, 3)(np.array(positions, np.int64)).tolist() == [whole[i] for i in positions]


def test_an_order_never_changes_between_versions_or_platforms() -> None:
    assert order(10, 0, 0) == [7, 2, 9, 5, 0, 8, 3, 1, 4, 6]
    assert Permutation(10**12, 1, 2)(np.arange(3)).tolist() == [550756524702, 444671937812, 243853823468]


def chi_square(counts: np.ndarray) -> float:
    """In standard deviations from what chance gives on average."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_likely(n: int) -> None:
    found = Counter(tuple(order(n, seed)) for seed in range(6000))
    counts = np.array([found[one] for one in itertools.permutations(range(n))])
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_each_index_is_equally_likely_at_each_position(n: int) -> None:
    orders = np.array([order(n, 5, epoch) for epoch in range(3000)])
    bins = min(n, 10)
    counts = np.zeros((bins, bins))
    np.add.at(counts, (np.arange(n) * bins // n, orders * bins // n), 1)
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((1, 0), id="seed"),
        pytest.param((0, 1), id="epoch"),
        pytest.param((2**63, 0), id="distant-seed"),
    ],
)
@pytest.mark.parametrize("n", [1000, 65_536, 100_000])
def test_orders_of_two_seeds_or_epochs_are_independent(n: int, other: tuple[int, int]) -> None:
    one, two = np.array(order(n, 0, 0)), np.array(order(n, *other))
    assert (one == two).sum() <= 8, "of which chance has one on average"
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / n**0.5


@pytest.mark.parametrize("n", [1000, 65_536, 1_000_003])
def test_neighbours_in_an_order_are_not_neighbours_in_the_data(n: int) -> None:
    found = np.array(order(n, 11))
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / n**0.5
    steps = np.diff(found) % n
    counts = np.bincount(steps * 16 // n, minlength=16)
    assert abs(chi_square(counts)) < 5
    assert Counter(steps.tolist()).most_common(1)[0][1] < 20


def test_billion_samples_need_negligible_memory() -> None:
    Permutation(10**9, 1)(np.arange(8))
    tracemalloc.start()
    Permutation(10**9, 1)(np.arange(10**9 - 4096, 10**9))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


def test_draws_are_spread_evenly_and_independent_of_their_neighbours() -> None:
    found = uniform(np.arange(100_000), make_keys(2, 1, 2))
    assert found.min() >= 0
    assert found.max() < 1
    assert abs(chi_square(np.bincount((found * 100).astype(int), minlength=100))) < 5
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02


def test_keys_depend_on_each_part_and_on_their_order() -> None:
    parts = [(1, 2), (2, 1), (1,), (1, 2, 0), (-1, 2), (2**64 - 1, 3)]
    assert len({make_keys(1, *one)[0] for one in parts}) == len(parts)
    assert make_keys(3, 1).tolist() == make_keys(17, 1)[:3].tolist()
