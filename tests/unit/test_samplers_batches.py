"""Batches balanced by length or by tokens: all ranks do as much, in as many steps, in any world."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob import ElasticBalancedBatchSampler, ElasticTokenBatchSampler, InputError

RANDOM = np.random.default_rng(3)
LENGTHS = np.minimum(RANDOM.lognormal(5, 1, 3000).astype(int) + 1, 2000)
samples = st.lists(st.integers(0, 50), min_size=1, max_size=200)
tails = st.sampled_from(["drop", "pad"])


def balanced(lengths: Any, size: int, world: int, **options: Any) -> list[ElasticBalancedBatchSampler]:
    return [ElasticBalancedBatchSampler(lengths, size, world, rank, **options) for rank in range(world)]


def by_tokens(lengths: Any, most: int, world: int, **options: Any) -> list[ElasticTokenBatchSampler]:
    return [ElasticTokenBatchSampler(lengths, most, world, rank, **options) for rank in range(world)]


def steps(samplers: list[Any]) -> list[tuple[list[int], ...]]:
    """Fails unless all ranks have as many."""
    return list(zip(*samplers, strict=True))


def together(step: tuple[list[int], ...]) -> list[int]:
    return sorted(itertools.chain(*step))


# Balanced


@given(samples, st.sampled_from([(4, 1), (4, 2), (8, 4), (6, 3)]), st.integers(1, 5), tails, st.booleans())
def test_each_sample_appears_once_and_ranks_have_equal_steps(
    lengths: list[int], sizes: tuple[int, int], look_ahead: int, tail: Any, shuffle: bool
) -> None:
    size, world = sizes
    samplers = balanced(lengths, size, world, look_ahead=look_ahead, tail=tail, shuffle=shuffle)
    found = steps(samplers)
    assert [len(s) for s in samplers] == [len(found)] * world
    assert all(len(batch) == size // world for step in found for batch in step)
    consumed = list(itertools.chain(*map(together, found)))
    if tail == "drop":
        assert len(set(consumed)) == len(consumed) == len(lengths) // size * size
    else:
        assert set(consumed) == set(range(len(lengths)))
        assert len(consumed) < len(lengths) + size


@pytest.mark.parametrize("look_ahead", [1, 8])
def test_any_world_size_has_the_same_batches_and_can_resume_anothers_state(look_ahead: int) -> None:
    whole = [together(step) for step in steps(balanced(LENGTHS, 64, 1, look_ahead=look_ahead))]
    state: dict[str, Any] = {}
    found = []
    for world, count in zip((2, 1, 4, 2), (5, 9, 17, 99), strict=True):
        samplers = balanced(LENGTHS, 64, world, look_ahead=look_ahead)
        for one in samplers:
            one.load_state_dict(state)
        made = [iter(s) for s in samplers]
        found += [
            together(step) for step in zip(*(itertools.islice(one, count) for one in made), strict=True)
        ]
        assert all(s.state_dict() == samplers[0].state_dict() for s in samplers)
        state = json.loads(json.dumps(samplers[-1].state_dict()))
    assert found == whole


def spread(found: list[tuple[list[int], ...]]) -> float:
    """The heaviest rank over the mean, on average over the steps."""
    sums = np.array([[LENGTHS[batch].sum() for batch in step] for step in found])
    return float((sums.max(axis=1) / sums.mean(axis=1)).mean())


def test_ranks_have_nearly_equal_sums_of_lengths() -> None:
    plain = RANDOM.permutation(3000)[: 3000 // 256 * 256].reshape(-1, 8, 32)
    assert spread([tuple(map(list, step)) for step in plain.tolist()]) > 1.2
    assert spread(steps(balanced(LENGTHS, 256, 8, tail="drop"))) < 1.05


def test_looking_ahead_makes_batches_of_similar_lengths() -> None:
    def padding(look_ahead: int) -> float:
        found = steps(balanced(LENGTHS, 64, 2, look_ahead=look_ahead, tail="drop"))
        batches = [LENGTHS[batch] for step in found for batch in step]
        return sum(b.max() * b.size for b in batches) / sum(b.sum() for b in batches)

    assert padding(16) < 1.5 < 3 < padding(1)


def test_balanced_state_for_other_lengths_or_batches_is_refused_by_name() -> None:
    (sampler,) = balanced([1, 2, 3, 4], 2, 1)
    for other, name in (
        (balanced([1, 2, 3, 5], 2, 1), "lengths"),
        (balanced([1, 2, 3, 4], 4, 1), "global_batch_size"),
    ):
        with pytest.raises(InputError, match=f"{name} is .* in the state"):
            sampler.load_state_dict(other[0].state_dict())


# By tokens


@given(
    samples,
    st.integers(50, 300),
    st.integers(1, 5),
    tails,
    st.booleans(),
    st.sampled_from([None, 3]),
    st.booleans(),
)
def test_batches_respect_the_budget_and_every_sample_appears_once(
    lengths: list[int], most: int, world: int, tail: Any, padded: bool, largest: int | None, shuffle: bool
) -> None:
    options = {
        "tail": tail,
        "padded": padded,
        "max_batch_size": largest,
        "shuffle": shuffle,
        "look_ahead": 64,
    }
    samplers = by_tokens(lengths, most, world, **options)
    found = steps(samplers)
    assert [len(s) for s in samplers] == [len(found)] * world
    for batch in itertools.chain(*found):
        of_batch = [lengths[i] for i in batch]
        assert 0 < len(batch) <= (largest or len(batch))
        assert (max(of_batch) * len(batch) if padded else sum(of_batch)) <= most
    batches = steps(by_tokens(lengths, most, 1, **options))
    consumed = list(itertools.chain(*map(together, found)))
    if tail == "pad":
        assert set(consumed) == set(range(len(lengths)))
    else:
        assert len(set(consumed)) == len(consumed)
        assert len(found) == len(batches) // world


@pytest.mark.parametrize("look_ahead", [40, 512, 8192])
def test_worlds_of_2_1_4_and_2_share_one_sequence_of_batches(look_ahead: int) -> None:
    whole = [step[0] for step in steps(by_tokens(LENGTHS, 4000, 1, look_ahead=look_ahead))]
    state: dict[str, Any] = {}
    found: list[list[int]] = []
    for world, count in zip((2, 1, 4, 2), (15, 23, 21, 999), strict=True):
        samplers = by_tokens(LENGTHS, 4000, world, look_ahead=look_ahead, drop_last=True)
        for one in samplers:
            one.load_state_dict(state)
        made = [iter(s) for s in samplers]
        for step in zip(*(itertools.islice(one, count) for one in made), strict=True):
            found += step
        assert all(s.state_dict() == samplers[0].state_dict() for s in samplers)
        state = json.loads(json.dumps(samplers[-1].state_dict()))
    assert found == whole[: len(found)]
    assert len(found) > len(whole) - 2


@pytest.mark.parametrize("world", [3, 5, 7])
def test_last_step_is_padded_alike_after_a_resume_in_a_later_chunk(world: int) -> None:
    whole = steps(by_tokens(LENGTHS, 4000, world, look_ahead=100, tail="pad"))
    originals = by_tokens(LENGTHS, 4000, world, look_ahead=100, tail="pad")
    resumed = by_tokens(LENGTHS, 4000, world, look_ahead=100, tail="pad")
    for old, new in zip(originals, resumed, strict=True):
        list(itertools.islice(iter(old), len(whole) - 2))
        new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert steps(resumed) == whole[-2:]
    (alone,) = by_tokens(LENGTHS, 4000, 1, look_ahead=100)
    assert len(list(alone)) % world, "the last step needs padding"


def test_ranks_have_similar_numbers_of_tokens_in_a_step() -> None:
    found = steps(by_tokens(LENGTHS, 8000, 4, drop_last=True))
    cost = np.array([[LENGTHS[batch].max() * len(batch) for batch in step] for step in found])
    assert (cost.max(axis=1) / cost.mean(axis=1)).mean() < 1.15
    tokens = sum(LENGTHS[batch].sum() for step in found for batch in step)
    assert cost.sum() / tokens < 1.2, "of a plain shuffle most would be padding"


def test_state_resumes_without_packing_earlier_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    (old,), (new,), (whole,) = (by_tokens(LENGTHS, 4000, 1, look_ahead=100) for _ in range(3))
    batches = list(whole)
    list(itertools.islice(iter(old), len(batches) - 3))
    packed = []
    original = ElasticTokenBatchSampler._batches
    monkeypatch.setattr(
        ElasticTokenBatchSampler, "_batches", lambda self, *at: packed.append(at) or original(self, *at)
    )
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert list(new) == batches[-3:]
    assert len(packed) <= 2
    new.set_epoch(1)
    whole.set_epoch(1)
    assert list(new) == list(whole)


def test_length_is_that_of_the_current_epoch() -> None:
    (sampler,) = by_tokens(LENGTHS, 4000, 1, look_ahead=64)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len(sampler) == len(list(sampler))


def test_indivisible_batches_are_an_error_if_requested() -> None:
    (first, *_) = by_tokens([10] * 7, 10, 4, tail="error")
    with pytest.raises(
        InputError, match=r"batches must be a multiple of the number of ranks \(4\), but is 7"
    ):
        next(iter(first))


def test_only_the_batches_that_are_left_must_divide_on_resume() -> None:
    (alone,) = by_tokens([10] * 7, 10, 1, tail="error")
    taken = list(itertools.islice(iter(alone), 3))
    four = by_tokens([10] * 7, 10, 4, tail="error")
    for one in four:
        one.load_state_dict(alone.state_dict())
    (step,) = steps(four)
    assert sorted(itertools.chain(*taken, *step)) == list(range(7))


def test_a_sample_longer_than_the_budget_is_named() -> None:
    with pytest.raises(InputError, match="number 2 with 900 tokens, but max_tokens is 512"):
        by_tokens([5, 6, 900], 512, 1)


@pytest.mark.parametrize("lengths", [[1.5, 2], [-1, 2], [[1], [2]]], ids=str)
def test_lengths_that_are_not_counts_are_refused(lengths: Any) -> None:
    for make in (balanced, by_tokens):
        with pytest.raises(InputError, match="lengths must be a one-dimensional array"):
            make(lengths, 2, 1)


def test_lengths_may_be_a_tensor_or_an_array() -> None:
    rows = [LENGTHS, LENGTHS.tolist(), torch.from_numpy(LENGTHS)]
    assert len({str(list(by_tokens(row, 4000, 1)[0])) for row in rows}) == 1


def test_options_that_allow_no_sample_are_refused() -> None:
    with pytest.raises(InputError, match="look_ahead must be at least 1"):
        by_tokens([1], 5, 1, look_ahead=0)
    with pytest.raises(InputError, match="max_batch_size must be at least 1"):
        by_tokens([1], 5, 1, max_batch_size=0)
    with pytest.raises(InputError, match="look_ahead must be at least 1"):
        balanced([1], 5, 1, look_ahead=0)
    with pytest.raises(InputError, match="choose a multiple of 2"):
        balanced([1], 5, 2)
