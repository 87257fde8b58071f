"""Parts of batches put together: what default_collate makes of all samples, or nothing."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate
from trees import digest

from dataloaderjob.trainer.epochs.merging import NotMergedError, merged

Pair = namedtuple("Pair", "a b")  # noqa: PYI024  as users write it
leaves = st.sampled_from(
    [
        lambda n: torch.full((2, 3), float(n)),
        lambda n: torch.tensor(n),
        lambda n: np.full((4,), n, np.int16),
        lambda n: np.float32(n),
        lambda n: n,
        lambda n: n / 3,
        lambda n: n % 2 == 0,
        lambda n: f"name {n}",
        lambda n: bytes([n]),
        lambda n: torch.empty(0),
    ]
)
makers = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda of: lambda n: [make(n) for make in of]),
        st.lists(inner, max_size=3).map(lambda of: lambda n: tuple(make(n) for make in of)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(
            lambda of: lambda n: {key: make(n) for key, make in of.items()}
        ),
        st.tuples(inner, inner).map(lambda of: lambda n: Pair(of[0](n), of[1](n))),
    ),
    max_leaves=6,
)


def parts_of(samples: list[Any], cuts: list[int]) -> tuple[list[Any], list[int]]:
    ends = [0, *sorted(cuts), len(samples)]
    pieces = [samples[at:end] for at, end in pairwise(ends) if end > at]
    return [default_collate(piece) for piece in pieces], [len(piece) for piece in pieces]


@given(makers, st.integers(1, 9), st.lists(st.integers(1, 8), max_size=3))
def test_merged_parts_equal_default_collate_of_the_whole(make: Any, count: int, cuts: list[int]) -> None:
    samples = [make(n) for n in range(count)]
    whole = default_collate(samples)
    assert digest(merged(*parts_of(samples, [cut for cut in cuts if cut < count]))) == digest(whole)


@pytest.mark.parametrize(
    "samples",
    [
        [torch.zeros(2), torch.zeros(3)],
        [{"a": 1}, {"b": 1}],
        [(1, 2), (1,)],
        [1, "one"],
        [1, 1.5],
        [OrderedDict(a=1), OrderedDict(a=2)],
        [["one", "two"], [(1, 2), (3, 4)]],
        [torch.zeros(1, dtype=torch.int32), torch.zeros(1)],
        [torch.zeros(1, requires_grad=True), torch.zeros(1)],
    ],
)
def test_ambiguous_parts_are_not_merged(samples: list[Any]) -> None:
    with pytest.raises(NotMergedError):
        merged(*parts_of(samples, [1]))
