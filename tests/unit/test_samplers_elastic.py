"""The elastic world: any number of ranks consumes the same global batches, also after a checkpoint on others."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from dataloaderjob import ElasticDistributedSampler, InputError

worlds = st.integers(1, 9)
sizes = st.integers(0, 300)
tails = st.sampled_from(["drop", "pad"])


def ranks(n: int, world: int, **options: Any) -> list[ElasticDistributedSampler]:
    return [ElasticDistributedSampler(range(n), world, rank, **options) for rank in range(world)]


def steps(samplers: list[ElasticDistributedSampler], batch: int) -> list[list[list[int]]]:
    """Step, rank, batch. Fails unless all ranks have as many steps, of as many samples."""
    found = list(zip(*(BatchSampler(s, batch, drop_last=False) for s in samplers), strict=True))
    assert all(len({len(one) for one in step}) == 1 for step in found)
    return [list(step) for step in found]


def together(step: list[list[int]]) -> list[int]:
    return sorted(itertools.chain(*step))


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state))
    assert found == state
    return found


# One world


@given(sizes, worlds, st.booleans(), st.booleans())
def test_ranks_have_the_same_number_of_samples_as_with_torchs_sampler(
    n: int, world: int, shuffle: bool, drop: bool
) -> None:
    torchs = [DistributedSampler(range(n), world, rank, shuffle, drop_last=drop) for rank in range(world)]
    for mine, other in zip(ranks(n, world, shuffle=shuffle, drop_last=drop), torchs, strict=True):
        assert len(list(mine)) == len(mine) == len(other)
        assert (mine.num_samples, mine.total_size) == (other.num_samples, other.total_size)


@given(st.integers(1, 300), worlds, st.booleans())
def test_without_shuffle_each_rank_has_the_samples_of_torchs_sampler(n: int, world: int, drop: bool) -> None:
    for rank, mine in enumerate(ranks(n, world, shuffle=False, drop_last=drop)):
        assert list(mine) == list(DistributedSampler(range(n), world, rank, shuffle=False, drop_last=drop))


@given(st.integers(1, 300), worlds, tails)
def test_every_sample_appears_once_except_in_the_tail(n: int, world: int, tail: Any) -> None:
    found = sorted(itertools.chain(*ranks(n, world, tail=tail)))
    if tail == "drop":
        assert len(set(found)) == len(found) == n - n % world
    else:
        assert set(found) == set(range(n))
        assert len(found) < n + world


def test_sampler_is_a_torch_one_that_frameworks_leave_in_place() -> None:
    assert isinstance(ranks(10, 2)[0], DistributedSampler)


def test_sampler_can_be_rebuilt_from_its_attributes() -> None:
    made = ranks(103, 4, seed=3, tail="drop", global_batch_size=8)[2]
    names = ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last", "tail", "global_batch_size")
    assert list(ElasticDistributedSampler(**{name: getattr(made, name) for name in names})) == list(made)


def test_each_epoch_and_seed_has_its_own_repeatable_order() -> None:
    (sampler,) = ranks(50, 1)
    first = list(sampler)
    assert first == list(sampler) == sampler.indices(0, 50).tolist()
    sampler.set_epoch(1)
    assert first != list(sampler) == sampler.indices(0, 50).tolist()
    assert first != list(ranks(50, 1, seed=1)[0])


def test_epoch_set_after_iter_applies_until_the_first_sample() -> None:
    (sampler,), (other,) = ranks(50, 1), ranks(50, 1)
    begun = iter(sampler)
    sampler.set_epoch(3)
    other.set_epoch(3)
    assert list(begun) == list(other)


# Another world


@given(
    st.integers(1, 40),
    st.sampled_from([(1, 4), (2, 4), (1, 6), (3, 6), (2, 8)]),
    st.integers(1, 4),
    tails,
    st.integers(0, 9),
)
def test_worlds_with_the_same_product_have_the_same_global_batches(
    count: int, pair: tuple[int, int], batch: int, tail: Any, more: int
) -> None:
    few, many = pair
    global_batch = many * batch
    n = count * global_batch // 4 + more
    options = {"tail": tail, "global_batch_size": global_batch}
    one = [together(step) for step in steps(ranks(n, few, **options), global_batch // few)]
    two = [together(step) for step in steps(ranks(n, many, **options), batch)]
    assert one == two


@given(st.integers(1, 60), st.integers(1, 5))
def test_accumulated_batches_equal_the_global_batch_of_a_larger_world(n: int, batch: int) -> None:
    n *= 4
    large = [together(step) for step in steps(ranks(n, 4, tail="drop", global_batch_size=4 * batch), batch)]
    small = steps(ranks(n, 2, tail="drop", global_batch_size=4 * batch), batch)
    assert large == [together(one + two) for one, two in zip(small[::2], small[1::2], strict=True)]


@given(st.integers(0, 7), st.integers(1, 6), st.lists(st.integers(0, 6), min_size=3, max_size=3), tails)
def test_worlds_of_2_1_4_and_2_in_one_epoch_use_each_sample_once(
    more: int, batch: int, taken: list[int], tail: Any
) -> None:
    global_batch = 4 * batch
    n = 20 * global_batch + more
    options = {"tail": tail, "global_batch_size": global_batch}
    whole = [together(step) for step in steps(ranks(n, 1, **options), global_batch)]
    state: dict[str, Any] = {}
    found = []
    for world, count in zip((2, 1, 4, 2), (*taken, 99), strict=True):
        samplers = ranks(n, world, **options)
        for sampler in samplers:
            sampler.load_state_dict(state)
        made = [iter(BatchSampler(s, global_batch // world, drop_last=False)) for s in samplers]
        for _ in range(count):
            step = [next(one, None) for one in made]
            assert len({one is None for one in step}) == 1
            if step[0] is None:
                break
            found.append(together(step))
        states = [sampler.state_dict() for sampler in samplers]
        assert all(one == states[0] for one in states), "a state has no rank"
        state = through_json(states[0])
    assert found == whole
    if tail == "drop":
        assert len(set(itertools.chain(*found))) == n - n % global_batch
    else:
        assert set(itertools.chain(*found)) == set(range(n))


@given(sizes, worlds, worlds, st.integers(0, 80), tails)
def test_ranks_have_equal_steps_left_after_any_world_size(
    n: int, before: int, after: int, taken: int, tail: Any
) -> None:
    old, rest = ranks(n, before, tail=tail), ranks(n, after, tail=tail)
    first = [list(itertools.islice(iter(s), taken)) for s in old]
    for sampler in rest:
        sampler.load_state_dict(old[0].state_dict())
    found = [list(s) for s in rest]
    assert len({len(one) for one in found}) == 1
    consumed = [*itertools.chain(*first), *itertools.chain(*found)]
    if tail == "pad":
        assert set(consumed) == set(range(n))
        assert len(consumed) < n + before + after
    else:
        assert len(set(consumed)) == len(consumed) > n - after - before


def test_indivisible_samples_with_tail_error_are_refused_with_sizes() -> None:
    with pytest.raises(
        InputError, match=r"remaining samples must be a multiple of the number of ranks \(4\), but is 10"
    ):
        ranks(10, 4, tail="error")
    with pytest.raises(
        InputError, match=r"samples must be a multiple of the global batch size \(8\), but is 12"
    ):
        ranks(12, 4, tail="error", global_batch_size=8)
    assert len(list(ranks(12, 4, tail="error")[3])) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"tail": "wrap"}, "one of drop, pad, error, but is 'wrap'", id="tail"),
        pytest.param({"tail": "pad", "drop_last": True}, "drop_last=True means tail='drop'", id="drop_last"),
        pytest.param({"global_batch_size": 10}, "but has 10: choose a multiple of 4", id="shares"),
        pytest.param({"global_batch_size": 0}, "but has 0", id="no-batch"),
    ],
)
def test_contradictory_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ranks(100, 4, **options)


def test_rank_outside_the_world_is_refused_as_in_torch() -> None:
    with pytest.raises(ValueError, match="Invalid rank 4"):
        ElasticDistributedSampler(range(10), 4, 4)


# State


@given(st.integers(1, 200), worlds, st.integers(0, 250), st.integers(0, 5))
def test_state_counts_the_samples_given_and_the_rest_follows(
    n: int, world: int, taken: int, epoch: int
) -> None:
    sampler, whole = (ranks(n, world)[-1] for _ in range(2))
    for one in (sampler, whole):
        one.set_epoch(epoch)
    begun = iter(sampler)
    given_ = list(itertools.islice(begun, taken))
    state = through_json(sampler.state_dict())
    assert state["position"] == len(given_) * world
    assert state == begun.state_dict()
    fresh = ranks(n, world)[-1]
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert given_ + list(fresh) == list(whole)
    assert list(fresh) == list(whole), "the iteration after that is a whole epoch"


def test_state_is_a_snapshot_that_later_steps_do_not_change() -> None:
    (sampler,) = ranks(20, 1)
    begun = iter(sampler)
    next(begun)
    state = sampler.state_dict()
    before = dict(state)
    next(begun)
    assert state == before != sampler.state_dict()


def test_a_state_has_no_rank_and_a_few_plain_values() -> None:
    found = ranks(100, 4, seed=9)[3].state_dict()
    assert found == {
        "version": 1, "sampler": "ElasticDistributedSampler", "epoch": 0, "position": 0, "samples": 100, "seed": 9,
        "shuffle": True,
    }  # fmt: skip


def test_iterator_has_its_own_state_that_can_be_saved_and_loaded() -> None:
    (sampler,), (whole,) = ranks(9000, 1), ranks(9000, 1)
    begun = iter(sampler)
    for _ in range(10):
        next(begun)
    state = begun.state_dict()
    list(itertools.islice(begun, 5000))
    begun.load_state_dict(state)
    assert list(begun) == list(whole)[10:]


def test_unused_iterator_does_not_consume_a_loaded_state() -> None:
    """torch's loaders with workers and batch_size=None ask twice for an iterator and use the second."""
    (sampler,), (whole,) = ranks(20, 1), ranks(20, 1)
    sampler.load_state_dict({**sampler.state_dict(), "position": 5})
    iter(sampler)
    assert list(sampler) == list(whole)[5:]


def test_state_at_an_epochs_end_gives_an_empty_epoch_then_whole_ones() -> None:
    (sampler,), (fresh,) = ranks(20, 1), ranks(20, 1)
    whole = list(sampler)
    fresh.load_state_dict(sampler.state_dict())
    assert [list(fresh), list(fresh)] == [[], whole]


def test_other_epoch_drops_a_loaded_position_and_the_same_keeps_it() -> None:
    (sampler,), (whole,) = ranks(20, 1), ranks(20, 1)
    state = {**sampler.state_dict(), "epoch": 2, "position": 5}
    whole.set_epoch(2)
    sampler.load_state_dict(state)
    assert sampler.epoch == 2
    sampler.set_epoch(2)
    assert list(sampler) == list(whole)[5:]
    sampler.load_state_dict(state)
    sampler.set_epoch(3)
    whole.set_epoch(3)
    assert list(sampler) == list(whole)
    assert sampler.state_dict()["epoch"] == 3


def test_epoch_already_set_is_not_undone_by_an_earlier_state() -> None:
    """torch's StatefulDataLoader loads what it was given at the next iter(), after set_epoch."""
    (sampler,), (whole,) = ranks(20, 1), ranks(20, 1)
    list(sampler)
    ended = sampler.state_dict()
    sampler.set_epoch(1)
    whole.set_epoch(1)
    abandoned = iter(sampler)
    abandoned.load_state_dict(ended)
    assert list(sampler) == list(whole)


def test_empty_state_loads_nothing_and_unknown_keys_are_ignored() -> None:
    (sampler,) = ranks(20, 1)
    whole = list(sampler)
    sampler.load_state_dict({})
    iter(sampler).load_state_dict({})
    assert list(sampler) == whole
    sampler.load_state_dict({**sampler.state_dict(), "position": 3, "later": [1]})
    assert list(sampler) == whole[3:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"seed": 4}, "seed is 0 here and 4 in the state", id="seed"),
        pytest.param({"samples": 21}, "samples is 20 here and 21 in the state", id="dataset"),
        pytest.param({"shuffle": False}, "shuffle is True here and False in the state", id="shuffle"),
        pytest.param({"sampler": "Other"}, "'ElasticDistributedSampler' here and 'Other'", id="class"),
        pytest.param({"version": 2}, "version is 1 here and 2", id="version"),
        pytest.param({"seed": 4, "samples": 21}, "samples is .*; seed is ", id="two-of-them"),
        pytest.param({"position": -1}, "at least 0, but is -1", id="position"),
        pytest.param({"position": "3"}, "is not a state of ElasticDistributedSampler", id="no-number"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name_and_changes_nothing(
    change: dict[str, Any], message: str
) -> None:
    (sampler,) = ranks(20, 1)
    before = sampler.state_dict()
    for target in (sampler, iter(sampler)):
        with pytest.raises(InputError, match=message):
            target.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_dict_that_is_not_a_state_is_refused_with_the_missing_keys() -> None:
    with pytest.raises(
        InputError, match=r"must have epoch, position, version, .* has only yielded: load the result"
    ):
        ranks(20, 1)[0].load_state_dict({"yielded": 3})


def test_drawing_from_a_billion_samples_takes_less_than_ten_megabytes() -> None:
    sampler = ElasticDistributedSampler(range(10**9), 8, 3)
    next(iter(sampler))
    tracemalloc.start()
    drawn = sum(1 for _ in itertools.islice(iter(sampler), 50_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert drawn == 50_000
    assert peak < 10e6


def test_a_position_in_a_billion_samples_is_reached_at_once() -> None:
    sampler = ElasticDistributedSampler(range(10**9), 64, 3)
    sampler.load_state_dict({**sampler.state_dict(), "position": 9 * 10**8})
    assert (
        list(itertools.islice(iter(sampler), 3))
        == sampler.indices(9 * 10**8 + 3, 9 * 10**8 + 132)[::64].tolist()
    )
