"""Draws by weights and mixtures of datasets: proportions in every prefix, passes, curricula, state."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, TensorDataset

from dataloaderjob import ElasticMixtureSampler, ElasticWeightedSampler, InputError
from dataloaderjob.samplers.alias import AliasTable
from dataloaderjob.samplers.elastic import Tail
from dataloaderjob.samplers.shares import Shares

weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=12).filter(any)
parts = st.lists(st.integers(1, 40), min_size=1, max_size=5)


# Shares


@given(weights, st.integers(0, 2**40))
def test_each_dataset_has_its_share_of_every_prefix_within_two(given_: list[float], start: int) -> None:
    shares, total = Shares(given_), sum(given_)
    counts = np.array(shares.counts(start), dtype=float)
    assert counts.sum() == start
    drift = start / 2**31  # of shares that have 31 bits
    for part, which, numbers in shares.split(np.arange(start, start + 300)):
        assert numbers.tolist() == list(range(int(counts[part]), int(counts[part]) + numbers.size))
        behind = numbers + 1 - (start + which + 1) * (given_[part] / total)
        assert np.abs(behind).max() <= 2.0 + drift


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_either_of_two_datasets_is_within_half_a_position_of_its_share(one: float, two: float) -> None:
    found = np.zeros(1000)
    for part, which, _ in Shares([one, two]).split(np.arange(1000)):
        found[which] = part == 0
    assert np.abs(np.cumsum(found) - np.arange(1, 1001) * (one / (one + two))).max() <= 0.5 + 1e-6


@given(weights)
def test_every_position_belongs_to_one_dataset_with_a_weight(given_: list[float]) -> None:
    found = [which for part, which, _ in Shares(given_).split(np.arange(500)) if given_[part]]
    assert sorted(itertools.chain(*found)) == list(range(500))


# Mixtures


def mixtures(
    lengths: Sequence[int], given_: Any, world: int = 1, *, epoch: int = 0, **options: Any
) -> list[ElasticMixtureSampler]:
    made = [
        ElasticMixtureSampler([range(n) for n in lengths], given_, num_replicas=world, rank=rank, **options)
        for rank in range(world)
    ]
    for one in made:
        one.set_epoch(epoch)
    return made


def of(keys: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """The keys of each dataset, as indices of its own."""
    ends = list(itertools.accumulate(lengths))
    return [[k - end + n for k in keys if end - n <= k < end] for n, end in zip(lengths, ends, strict=True)]


def test_mixture_indexes_the_loaders_concatenated_dataset() -> None:
    data = ConcatDataset([TensorDataset(torch.arange(n) + 100 * i) for i, n in enumerate((10, 30))])
    sampler = ElasticMixtureSampler(data, [3, 1], 20, 1, 0)
    values = [int(data[k][0]) for k in sampler]
    assert [sum(v < 100 for v in values), sum(v >= 100 for v in values)] == [15, 5]
    assert len(ElasticMixtureSampler(data, [3, 1], num_replicas=4, rank=0)) == 10


@given(parts, st.data(), st.integers(1, 4), st.integers(0, 3))
def test_pass_has_each_sample_once_and_the_next_another_order(
    lengths: list[int], data: st.DataObject, world: int, epoch: int
) -> None:
    given_ = data.draw(st.lists(st.floats(0.1, 10), min_size=len(lengths), max_size=len(lengths)))
    samplers = mixtures(lengths, given_, world, epoch=epoch, num_samples=200)
    order = samplers[0].indices(0, 200).tolist()
    for keys, n in zip(of(order, lengths), lengths, strict=True):
        passes = [keys[i : i + n] for i in range(0, len(keys) - n + 1, n)]
        assert all(sorted(one) == list(range(n)) for one in passes)
        if n >= 20 and len(passes) > 1:
            assert passes[0] != passes[1]


@given(st.sampled_from([2, 3, 4, 8]), st.integers(0, 5))
def test_ranks_together_consume_the_global_order_in_each_round(world: int, epoch: int) -> None:
    samplers = mixtures([50, 70, 9], [1, 2, 3], world, epoch=epoch, num_samples=240)
    rounds = list(zip(*samplers, strict=True))
    order = samplers[0].indices(0, 240).tolist()
    assert [sorted(one) for one in rounds] == [sorted(order[i : i + world]) for i in range(0, 240, world)]


def test_ranks_get_equal_shares_of_a_dataset_despite_regular_turns() -> None:
    for sampler in mixtures([4000, 4000], [1, 1], 2):
        counts = [len(keys) for keys in of(list(sampler), [4000, 4000])]
        assert min(counts) > 1800, "without turns at random it would have one dataset only"


def test_worlds_of_2_1_4_and_2_consume_one_order_of_the_mixture() -> None:
    order = mixtures([50, 70], [1, 3], num_samples=160)[0].indices(0, 160).tolist()
    state: dict[str, Any] = {}
    found: list[int] = []
    for world in (2, 1, 4, 2):
        samplers = mixtures([50, 70], [1, 3], world, num_samples=160)
        for one in samplers:
            one.load_state_dict(state)
        for keys in zip(*(itertools.islice(iter(s), 40 // world) for s in samplers), strict=True):
            found += keys
        state = json.loads(json.dumps(samplers[-1].state_dict()))
        assert sorted(found) == sorted(order[: len(found)])
    assert len(found) == 160


def test_curriculum_uses_the_weights_of_its_epoch() -> None:
    by_epoch = mixtures([100, 100], {0: [1, 0], 2: [1, 1], 5: [0, 1]}, num_samples=100)[0]
    by_function = mixtures([100, 100], lambda epoch: [5 - epoch, epoch], num_samples=100)[0]
    shown = []
    for epoch in (0, 1, 2, 4, 5, 7):
        by_epoch.set_epoch(epoch)
        shown.append(len(of(list(by_epoch), [100, 100])[1]))
    assert shown == [0, 0, 50, 50, 100, 100]
    by_function.set_epoch(1)
    assert len(of(list(by_function), [100, 100])[1]) == 20


def test_continuous_mixture_finishes_a_dataset_before_repeating_it() -> None:
    lengths = [100, 1000]
    (sampler,) = mixtures(lengths, {0: [9, 1], 3: [1, 1]}, num_samples=400, continuous=True)
    found: list[list[int]] = [[], []]
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for part, keys in enumerate(of(list(sampler), lengths)):
            found[part] += keys
    for keys, n in zip(found, lengths, strict=True):
        passes = [keys[i : i + n] for i in range(0, len(keys) - n + 1, n)]
        assert passes
        assert all(sorted(one) == list(range(n)) for one in passes)
    (anew,) = mixtures(lengths, [9, 1], num_samples=400, epoch=0)
    first = of(list(anew), lengths)[1]
    anew.set_epoch(1)
    assert set(first) & set(of(list(anew), lengths)[1]), "each epoch has a selection of its own"


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_continuous_order_does_not_depend_on_the_number_of_ranks(tail: Tail) -> None:
    made = {"num_samples": 401, "continuous": True, "tail": tail}
    orders = [
        mixtures([100, 1000], [9, 1], world, **made)[0].order(3)(np.arange(400)).tolist()
        for world in (1, 2, 7)
    ]
    assert orders[1:] == orders[:1] * 2


@pytest.mark.parametrize("continuous", [False, True], ids=["anew", "continuous"])
def test_mixture_resumes_from_its_state_in_this_epoch_and_the_next(continuous: bool) -> None:
    made = {"num_samples": 90, "continuous": continuous, "seed": 5}
    curriculum = {0: [1, 2], 1: [3, 1], 4: [1, 1]}
    (whole,), (old,), (new,) = (mixtures([20, 33], curriculum, **made) for _ in range(3))
    old.set_epoch(2)
    taken = list(itertools.islice(iter(old), 37))
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    for epoch in (2, 3, 4, 5):
        whole.set_epoch(epoch)
        new.set_epoch(epoch)
        assert list(whole) == taken + list(new)
        taken = []


def test_weights_from_a_function_of_the_training_come_from_the_state() -> None:
    loss = {0: 1.0, 1: 3.0}
    (old,) = mixtures([50, 50], lambda epoch: [loss[epoch], 1], num_samples=40, continuous=True)
    rest = []
    for epoch in (0, 1):
        old.set_epoch(epoch)
        begun = iter(old)
        rest = list(itertools.islice(begun, 10)) and list(begun)
    old.load_state_dict({**old.state_dict(), "position": 10})
    (new,) = mixtures([50, 50], lambda epoch: [0.5, 0.5], num_samples=40, continuous=True)
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert list(new) == rest


def test_state_for_other_weights_or_datasets_is_refused_by_name() -> None:
    (sampler,), (other,) = mixtures([20, 20], [1, 1]), mixtures([20, 20], [1, 2])
    with pytest.raises(InputError, match=r"weights of epoch 0 are \[1.0, 1.0\] here and \[1.0, 2.0\]"):
        sampler.load_state_dict(other.state_dict())
    with pytest.raises(InputError, match=r"lengths is \[20, 20\] here and \[19, 21\]"):
        sampler.load_state_dict(mixtures([19, 21], [1, 1])[0].state_dict())


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        pytest.param([1, 2, 3], r"for each of 2 datasets, but has \[1.0, 2.0, 3.0\]", id="too-many"),
        pytest.param([0, 0], "not all 0", id="nothing"),
        pytest.param([-1, 2], "at least 0", id="negative"),
        pytest.param(
            {2: [1, 1]},
            r"epoch 0 has no weights, because those given apply from epochs \[2\]",
            id="no-beginning",
        ),
    ],
)
def test_weights_that_do_not_fit_the_datasets_are_refused(given_: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mixtures([10, 10], given_)


def test_a_weight_for_a_dataset_without_samples_is_refused() -> None:
    with pytest.raises(InputError, match=r"datasets \[1\] have no samples"):
        mixtures([10, 0], [1, 1])
    assert len(list(mixtures([10, 0], [1, 0])[0])) == 10


# Draws by weights


def weighted(given_: Any, count: int, world: int = 1, **options: Any) -> list[ElasticWeightedSampler]:
    return [ElasticWeightedSampler(given_, count, world, rank, **options) for rank in range(world)]


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), min_size=1, max_size=60).filter(any))
def test_the_table_of_draws_has_exactly_the_weights(given_: list[float]) -> None:
    table = AliasTable(np.array(given_))
    found = table.own.copy()
    np.add.at(found, table.aliases, 1.0 - table.own)
    assert found / found.sum() == pytest.approx(np.array(given_) / sum(given_), abs=1e-12)
    assert all(given_[alias] > 0 for alias in table.aliases[table.own < 1])


def test_draws_are_proportional_to_weights_and_never_of_weight_0() -> None:
    given_ = [0, 1, 2, 0, 5, 0]
    found = Counter(weighted(given_, 80_000)[0])
    assert set(found) == {1, 2, 4}
    for index, count in found.items():
        assert abs(count - 10_000 * given_[index]) < 500


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(any), st.integers(0, 9))
def test_only_samples_with_a_weight_are_drawn(given_: list[float], seed: int) -> None:
    assert all(given_[index] > 0 for index in weighted(given_, 50, seed=seed)[0])


def test_weights_may_be_a_tensor_or_an_array() -> None:
    rows = [[1, 2, 3.0], torch.tensor([1, 2, 3.0]), np.array([1, 2, 3.0])]
    assert len({tuple(weighted(row, 50)[0]) for row in rows}) == 1


def test_ranks_draw_like_one_rank_and_resume_in_other_numbers() -> None:
    whole = list(weighted(range(100), 100)[0])
    two = weighted(range(100), 100, 2)
    begun = [iter(s) for s in two]
    found = [next(begun[i % 2]) for i in range(40)]
    three = weighted(range(100), 100, 3)
    for sampler in three:
        sampler.load_state_dict(json.loads(json.dumps(two[1].state_dict())))
    found += itertools.chain(*zip(*three, strict=True))
    assert found == whole


def test_each_epoch_draws_differently_and_other_weights_are_refused() -> None:
    (sampler,) = weighted([1, 2, 3], 50)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    with pytest.raises(InputError, match=r"weights is '.*' here and '.*' in the state"):
        sampler.load_state_dict(weighted([1, 2, 4], 50)[0].state_dict())


@pytest.mark.parametrize("given_", [[], [0, 0], [1, -1], [1, float("nan")], [[1, 2]]], ids=str)
def test_weights_unfit_for_drawing_are_refused(given_: Any) -> None:
    with pytest.raises(InputError, match="weights must be one-dimensional, finite"):
        weighted(given_, 10)
