"""What verify says of two batches: the first leaf, and the element of it, in which they differ."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from trees import Point, body, plain

from dataloaderjob.batches.differences import describe, first_difference


@dataclasses.dataclass
class Page:
    text: str
    tokens: torch.Tensor


class Box(collections.UserDict):  # type: ignore[type-arg]
    """A Mapping of the user's."""


def raw(batch: Any) -> bytes:
    return body(batch, allow_pickle=True).tobytes()


def images(*, at: tuple[int, ...] = (), value: float = 9.0) -> torch.Tensor:
    made = torch.zeros(2, 3, 4)
    if at:
        made[at] = value
    return made


NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        pytest.param(
            [{"image": images()}], [{"image": images(at=(1, 2, 3))}],
            "batch[0]['image'][1, 2, 3] is 0.0 in one and 9.0 in the other "
            "(1 of 24 elements of batch[0]['image'] differ)", id="an-element",
        ),
        pytest.param(
            images().permute(2, 0, 1), images(at=(1, 2, 3)).permute(2, 0, 1), "batch[3, 1, 2] is 0.0", id="strided"
        ),
        pytest.param(images(), images().double(), "tensor float32 [2, 3, 4] in one and tensor float64", id="dtype"),
        pytest.param(images(), images()[:1], "[2, 3, 4] in one and tensor float32 [1, 3, 4]", id="shape"),
        pytest.param(
            torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16),
            "batch[0] is 0x0000 in one and 0x3f80 in the other (2 of 2", id="without-numpy",
        ),
        pytest.param({"a": 1, "b": 2}, {"a": 1, "b": 3}, "batch['b'] is 2 in one and 3", id="a-number"),
        pytest.param([torch.ones(1), 0.0], [torch.ones(1), -0.0], "batch[1] is 0.0 in one and -0.0", id="zeros"),
        pytest.param([["a", ("b", 1)]], [["a", ("c", 1)]], "batch[0][1][0] is 'b' in one and 'c'", id="plain-tree"),
        pytest.param({"a": images()}, {"b": images()}, "keys ['a'] in one and a dict with the keys ['b']", id="keys"),
        pytest.param([images()], [images(), 1], "batch is a list of 1 in one and a list of 2", id="length"),
        pytest.param(Page("x", torch.ones(2)), Page("y", torch.ones(2)), "batch.text is 'x'", id="dataclass"),
        pytest.param(Point(images(), 1), Point(images(), 2), "batch[1] is 1 in one and 2", id="named-tuple"),
        pytest.param(np.array([1, 2]), np.array([1, 3]), "batch[1] is 2 in one and 3", id="array"),
        pytest.param(np.float32(1), np.float32(2), "batch is 1.0 in one and 2.0", id="scalar"),
        pytest.param([object(), 1], [object(), 2], "batch[1] is 1 in one and 2", id="behind-a-pickle"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(a: Any, b: Any, said: str) -> None:
    found = first_difference(raw(a), raw(b))
    assert found is not None
    assert said in found


@given(plain)
def test_equal_batches_have_no_difference(batch: Any) -> None:
    assert first_difference(raw(batch), raw(batch)) is None


def test_a_nan_is_equal_to_itself() -> None:
    assert first_difference(raw([NAN, torch.tensor(NAN)]), raw([NAN, torch.tensor(NAN)])) is None


@given(plain, plain)
def test_a_difference_is_found_exactly_where_the_bytes_differ(a: Any, b: Any) -> None:
    assert (first_difference(raw(a), raw(b)) is None) == (raw(a) == raw(b))


def test_a_description_has_a_line_for_each_leaf() -> None:
    lines = list(describe(raw({"image": images(), "labels": [1, 2], "box": Box(a=torch.ones(2))})))
    assert lines[:2] == ["batch['image']: tensor float32 [2, 3, 4]", "batch['labels']: [1, 2]"]
    assert lines[2].endswith(": tensor float32 [2]")
