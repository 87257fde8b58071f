"""Plans of batches in parts: how keys are split, and what replaces the answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core.control import MOST_AHEAD
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.trainer.epochs.parts_plan import PartsPlan, VerdictKind


@given(samples=st.integers(0, 40), most=st.integers(1, 12), position=st.integers(0, 1000))
def test_parts_cover_all_keys_in_order_at_their_places(samples: int, most: int, position: int) -> None:
    batch = PartsPlan(most).split(list(range(samples)), position)
    parts = batch.parts()
    assert [key for _, keys in parts for key in keys] == list(range(samples))
    assert [place - position for place, keys in parts if keys] == [keys[0] for _, keys in parts if keys]
    assert len(parts) == max(1, min(most, samples))
    assert max(batch.counts) - min(batch.counts) <= 1


@pytest.mark.parametrize(
    "keys",
    [[0, 1, 2], np.array([0, 1, 2]), torch.tensor([0, 1, 2])],
    ids=["list", "array", "tensor"],
)
def test_sampler_that_fills_its_keys_again_changes_no_request(keys: Any) -> None:
    batch = PartsPlan(2).split(keys, 0)
    keys[0] = 9
    assert [int(key) for key in batch.keys] == [0, 1, 2]


def test_window_shrinks_until_all_its_parts_fit_a_stream() -> None:
    assert PartsPlan(4).window(8) == 8
    assert PartsPlan(MOST_AHEAD).window(8) == 1


def judged(most: int, *answers: Any) -> tuple[PartsPlan, VerdictKind, Any]:
    plan = PartsPlan(most)
    plan.asks(plan.split(list(range(4)), 0))
    verdict = plan.judge(answers)
    return plan, verdict.kind, verdict.batch if verdict.error is None else verdict.error


def test_parts_that_merge_are_given_as_one_batch() -> None:
    _, kind, batch = judged(2, torch.tensor([0, 1]), torch.tensor([2, 3]))
    assert kind is VerdictKind.GIVE
    assert batch.tolist() == [0, 1, 2, 3]


def test_error_of_user_code_in_a_part_remakes_the_whole_batch() -> None:
    assert judged(2, torch.tensor([0, 1]), ValueError("bad"))[1] is VerdictKind.REMAKE


@pytest.mark.parametrize(
    ("most", "answers"),
    [(1, [ValueError("bad")]), (2, [torch.tensor([0, 1]), ServiceError("gone")])],
    ids=["of the only part", "of the service"],
)
def test_error_that_no_other_feeder_can_mend_is_raised(most: int, answers: list[Any]) -> None:
    assert judged(most, *answers)[1:] == (VerdictKind.RAISE, answers[-1])


def test_type_that_never_merges_ends_the_splitting() -> None:
    plan, kind, _ = judged(2, np.array([0, 1]), np.array([2, 3]))
    assert kind is VerdictKind.REMAKE
    assert len(plan.split([4, 5], 4).counts) == 1


def test_batch_that_does_not_merge_leaves_the_next_one_split() -> None:
    plan, kind, _ = judged(2, torch.zeros(2, 3), torch.zeros(2, 4))
    assert kind is VerdictKind.REMAKE
    assert len(plan.split([4, 5], 4).counts) == 2


def test_batch_counts_as_handled_only_once_it_was_returned() -> None:
    plan = PartsPlan(2)
    batch = plan.split([0, 1], 0)
    plan.asks(batch)
    assert plan.next == batch
    plan.passes()
    assert (plan.next, plan.handled, plan.last) == (None, -1, None)
