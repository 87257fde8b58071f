"""Which rows of a test with many parameters the quick runs have."""

from __future__ import annotations

import itertools

import pytest
from covering import covering, is_named
from hypothesis import given
from hypothesis import strategies as st

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def product(sizes: list[int]) -> list[dict[str, int]]:
    return [{f"p{n}": value for n, value in enumerate(row)} for row in itertools.product(*map(range, sizes))]


@given(SIZES)
def test_each_value_is_covered_with_as_few_rows_as_possible(sizes: list[int]):
    rows = product(sizes)
    chosen = [rows[n] for n in covering(rows, 1)]
    for number, size in enumerate(sizes):
        assert {row[f"p{number}"] for row in chosen} == set(range(size))
    assert len(chosen) == max(sizes)


@given(SIZES)
def test_each_pair_of_values_is_covered(sizes: list[int]):
    rows = product(sizes)
    chosen = [rows[n] for n in covering(rows, 2)]
    for a, b in itertools.combinations(range(len(sizes)), 2):
        found = {(row[f"p{a}"], row[f"p{b}"]) for row in chosen}
        assert found == set(itertools.product(range(sizes[a]), range(sizes[b])))


@pytest.mark.parametrize(("strength", "most"), [(1, 8), (2, 30), (3, 72)])
def test_three_parameters_take_fewer_rows_than_their_product(strength: int, most: int):
    assert len(covering(product([3, 8, 3]), strength)) <= most


@pytest.mark.parametrize(
    ("row", "names", "is_quick"),
    [
        ("ray-1", ["ray"], True),
        ("ray-1", ["local", "1"], True),
        ("ray-10", ["1"], False),
        ("4-(2, 0)-no-stage", ["4-(2, 0)-no-stage"], True),
        ("shuffled by a generator", ["shuffled"], False),
    ],
)
def test_row_is_quick_by_its_own_id_or_a_values_id(row: str, names: list[str], is_quick: bool):
    assert is_named(row, names) is is_quick


def test_impossible_pairs_of_values_are_not_required():
    assert covering([{"a": 0, "b": 0}, {"a": 1, "b": 1}], 2) == {0, 1}
