"""What a state keeps of generators, epochs and the kind of sampler: the orders of epochs after it was loaded."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import Augmented, fingerprint, ids
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint
from torch.utils import data

from dataloaderjob import (
    DataLoader,
    ElasticDistributedSampler,
    ElasticTokenBatchSampler,
    InputError,
)
from dataloaderjob.trainer.resume import generators
from dataloaderjob.trainer.resume.draws import Twister, drawn_between

N, BATCH = 23, 3
HERE = {"num_workers": 0}


def epoch(loader: DataLoader) -> list[str]:
    return [fingerprint(batch) for batch in loader]


def taken(loader: DataLoader, batches: int) -> None:
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)


def kept(loader: DataLoader) -> dict[str, Any]:
    return json.loads(json.dumps(loader.state_dict()))


def shuffled(**options: Any) -> DataLoader:
    return DataLoader(Augmented(N), BATCH, shuffle=True, **{**HERE, **options})


DRAWS: dict[str, Callable[[], Any]] = {
    "a model": lambda: torch.nn.Linear(3, 3),
    "a large model": lambda: torch.nn.Linear(300, 300),
    "an evaluation": lambda: list(DataLoader(Augmented(4), 2, **HERE)),
}


@pytest.mark.parametrize("batches", [None, 4], ids=["between epochs", "in mid-epoch"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_after_loading_change_no_order(name: str, batches: int | None) -> None:
    """Both runs are of one script: it makes its loader, and a model after that."""
    torch.manual_seed(3)
    loader = shuffled()
    DRAWS[name]()
    list(loader) if batches is None else taken(loader, batches)
    state = kept(loader)
    expected = [epoch(loader) for _ in range(2)]
    torch.manual_seed(3)
    again = shuffled()
    again.load_state_dict(state)
    DRAWS[name]()
    if batches is not None:
        list(again)
    assert [epoch(again) for _ in range(2)] == expected


@pytest.mark.parametrize("name", DRAWS)
def test_draws_after_loading_in_the_same_process_change_no_order(name: str) -> None:
    torch.manual_seed(3)
    loader = shuffled()
    list(loader)
    state = kept(loader)
    expected = [epoch(loader) for _ in range(2)]
    loader.load_state_dict(state)
    DRAWS[name]()
    assert [epoch(loader) for _ in range(2)] == expected


@pytest.mark.parametrize("batches", [None, 4], ids=["between epochs", "in mid-epoch"])
def test_a_script_that_seeds_each_epoch_keeps_its_orders(batches: int | None) -> None:
    def begin(number: int) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(100 + number)

    def orders(loader: DataLoader, first: int) -> list[list[str]]:
        found = []
        for number in range(first, 3):
            begin(number)
            found.append(epoch(loader))
        return found

    expected = orders(shuffled(), 0)
    begin(0)
    loader = shuffled()
    list(loader) if batches is None else taken(loader, batches)
    state = kept(loader)
    torch.manual_seed(7)
    again = shuffled()
    again.load_state_dict(state)
    if batches is not None:
        list(again)
    assert orders(again, 1) == expected[1:]


def test_generators_restored_after_loading_are_kept() -> None:
    torch.manual_seed(3)
    loader = shuffled()
    list(loader)
    state = kept(loader)
    torch.manual_seed(11)
    own = torch.get_rng_state()
    expected = epoch(loader)
    again = shuffled()
    again.load_state_dict(state)
    torch.set_rng_state(own)
    assert epoch(again) == expected


@pytest.mark.parametrize("batches", [None, 4], ids=["between epochs", "in mid-epoch"])
def test_generators_restored_to_a_later_point_of_the_stream_are_kept(batches: int | None) -> None:
    """As Accelerate does, whose copy of a loader's state is a batch older than the generators that it saves."""

    def begun() -> DataLoader:
        torch.manual_seed(3)
        torch.nn.Linear(30, 30)
        return shuffled()

    loader = begun()
    list(loader) if batches is None else taken(loader, batches)
    state = kept(loader)
    torch.rand(700)
    own = torch.get_rng_state()
    expected = epoch(loader)
    again = begun()
    again.load_state_dict(state)
    torch.set_rng_state(own)
    if batches is not None:
        list(again)
    assert epoch(again) == expected


def test_second_of_two_resumed_loaders_draws_after_the_first() -> None:
    torch.manual_seed(3)
    loaders = [shuffled(), shuffled()]
    for loader in loaders:
        list(loader)
    states = [kept(loader) for loader in loaders]
    expected = [epoch(loader) for loader in loaders]
    torch.manual_seed(3)
    again = [shuffled(), shuffled()]
    for loader, state in zip(again, states, strict=True):
        loader.load_state_dict(state)
    assert [epoch(loader) for loader in again] == expected


def test_draws_between_iter_and_the_first_batch_are_in_the_state() -> None:
    def begun() -> tuple[DataLoader, Iterator[Any]]:
        torch.manual_seed(0)
        loader = shuffled()
        iterator = iter(loader)
        torch.nn.Linear(3, 3)
        next(iterator)
        next(iterator)
        return loader, iterator

    loader, iterator = begun()
    state = kept(loader)
    expected = [fingerprint(batch) for batch in iterator], epoch(loader)
    again, _ = begun()
    torch.manual_seed(1)
    again.load_state_dict(state)
    iterator = iter(again)
    next(iterator)
    third, of_resumed = shuffled(), kept(again)
    assert [fingerprint(batch) for batch in iterator] == expected[0][1:]
    torch.manual_seed(2)
    third.load_state_dict(of_resumed)
    assert (epoch(third), epoch(third)) == (expected[0][1:], expected[1])


class Own(data.Sampler):
    """Draws from a generator that it has under a name of its own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        if isinstance(self.rng, torch.Generator):
            order = torch.randperm(N, generator=self.rng).tolist()
        elif isinstance(self.rng, random.Random):
            self.rng.gauss(0, 1)
            self.rng.shuffle(order)
        else:
            self.rng.standard_normal()
            order = self.rng.permutation(N).tolist()
        return iter(order)

    def __len__(self) -> int:
        return N


RNGS: dict[str, Callable[[int], Any]] = {
    "torch's": lambda seed: torch.Generator().manual_seed(seed),
    "Python's": random.Random,
    "numpy's": np.random.default_rng,
    "numpy's old one": np.random.RandomState,
    **{
        kind: lambda seed, kind=kind: np.random.Generator(getattr(np.random, kind)(seed))
        for kind in ("MT19937", "Philox", "SFC64")
    },
}


@pytest.mark.parametrize("batches", [None, 4], ids=["between epochs", "in mid-epoch"])
@pytest.mark.parametrize("name", RNGS)
def test_samplers_own_generator_is_in_the_state(name: str, batches: int | None) -> None:
    def made(seed: int) -> DataLoader:
        return DataLoader(Augmented(N), BATCH, sampler=Own(RNGS[name](seed)), **HERE)

    loader = made(1)
    list(loader)
    list(loader) if batches is None else taken(loader, batches)
    state = kept(loader)
    list(loader) if batches is None else None
    expected = epoch(loader)
    again = made(2)
    again.load_state_dict(state)
    list(again)
    assert epoch(again) == expected


def test_each_of_two_generators_is_in_the_state() -> None:
    def made(seed: int) -> DataLoader:
        sampler = data.RandomSampler(range(N), generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(seed + 1)
        return DataLoader(Augmented(N), batch_size=None, sampler=sampler, generator=generator, **HERE)

    loader = made(1)
    list(loader)
    again = made(5)
    again.load_state_dict(kept(loader))
    assert epoch(again) == epoch(loader)


# Draws


STATES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Twister], Callable[[Any, int], Any]]] = {
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda generator: Twister.of_torch(generator.get_state().numpy().tobytes()),
        lambda generator, count: torch.empty(count, dtype=torch.int32).random_(generator=generator),
    ),
    "Python": (
        random.Random,
        lambda generator: Twister(
            np.array(generator.getstate()[1][:-1], np.uint32), generator.getstate()[1][-1]
        ),
        lambda generator, count: [generator.getrandbits(32) for _ in range(count)],
    ),
    "numpy": (
        np.random.RandomState,
        lambda generator: Twister(generator.get_state()[1].copy(), generator.get_state()[2]),
        lambda generator, count: count and generator.bytes(4 * count),
    ),
}


@pytest.mark.parametrize("kind", STATES)
@given(seed=st.integers(0, 99), skipped=st.integers(0, 1300), count=st.integers(0, 3000))
@settings(max_examples=30, deadline=None)
def test_draws_between_two_states_are_counted(kind: str, seed: int, skipped: int, count: int) -> None:
    make, read, draw = STATES[kind]
    generator = make(seed)
    draw(generator, skipped)
    before = read(generator)
    draw(generator, count)
    after = read(generator)
    assert drawn_between(before, after) == count
    assert drawn_between(before, after, limit=count) == count
    assert drawn_between(read(make(seed + 1)), after, limit=10_000) is None
    if count:
        assert drawn_between(before, after, limit=count - 1) is None
        assert drawn_between(after, before, limit=10_000) is None


# Epochs


@pytest.mark.parametrize("kind", [data.DistributedSampler, ElasticDistributedSampler])
def test_epoch_may_be_set_before_or_after_loading(kind: type) -> None:
    def made() -> DataLoader:
        return DataLoader(Augmented(N), BATCH, sampler=kind(range(N), 1, 0, seed=5), dataset_id="a", **HERE)

    first = made()
    first.sampler.set_epoch(0)
    list(first)
    state = kept(first)
    first.sampler.set_epoch(1)
    expected = epoch(first)
    before, after = made(), made()
    before.sampler.set_epoch(1)
    before.load_state_dict(state)
    after.load_state_dict(state)
    after.sampler.set_epoch(1)
    assert epoch(before) == epoch(after) == expected


def elastic(world: int) -> DataLoader:
    sampler = ElasticDistributedSampler(range(9), world, 0, seed=1, drop_last=True)
    return DataLoader(Augmented(9), 4 // world, sampler=sampler, dataset_id="a", **HERE)


def tokens(world: int) -> DataLoader:
    sampler = ElasticTokenBatchSampler(range(3, 44), 90, num_replicas=world, rank=0, tail="drop")
    return DataLoader(Augmented(41), batch_sampler=sampler, dataset_id="a", **HERE)


@pytest.mark.parametrize("made", [elastic, tokens])
def test_dropped_tail_is_not_an_epoch_for_fewer_ranks(made: Callable[[int], DataLoader]) -> None:
    before = made(2)
    list(before)
    whole, again = made(1), made(1)
    again.load_state_dict(kept(before))
    for loader in (whole, again):
        (loader.batch_sampler if made is tokens else loader.sampler).set_epoch(1)
    assert ids(again) == ids(whole)


def test_a_state_after_skipping_is_plain_data() -> None:
    loader = DataLoader(Augmented(N), BATCH, sampler=ElasticDistributedSampler(range(N), 1, 0), **HERE)
    loader.skip(2)
    iterator = iter(loader)
    next(iterator)
    buffer = io.BytesIO()
    torch.save([loader.state_dict(), loader.sampler.state_dict()], buffer)
    buffer.seek(0)
    assert torch.load(buffer)[0]["batches"] == 3


# Another order


SAMPLERS: dict[str, Callable[[], Any]] = {
    "torch's": lambda: data.DistributedSampler(range(N), 1, 0, seed=1),
    "in order": lambda: data.DistributedSampler(range(N), 1, 0, shuffle=False, seed=1),
    "elastic": lambda: ElasticDistributedSampler(range(N), 1, 0, seed=1),
}


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in SAMPLERS for b in SAMPLERS if a != b])
def test_state_of_a_sampler_with_another_order_is_refused(before: str, after: str) -> None:
    loader = DataLoader(Augmented(N), BATCH, sampler=SAMPLERS[before](), **HERE)
    taken(loader, 2)
    again = DataLoader(Augmented(N), BATCH, sampler=SAMPLERS[after](), **HERE)
    with pytest.raises(InputError, match=r"sampler was '.*', but is '"):
        again.load_state_dict(kept(loader))


@pytest.mark.parametrize("batches", [None, 0, 2])
@pytest.mark.parametrize("sampler", [None, lambda: ElasticDistributedSampler(range(N), 1, 0)])
def test_a_distributed_checkpoint_of_the_loader_itself_can_be_loaded(
    tmp_path: Path, sampler: Callable[[], Any] | None, batches: int | None
) -> None:
    def made() -> DataLoader:
        order = {"shuffle": True} if sampler is None else {"sampler": sampler()}
        return DataLoader(Augmented(N), BATCH, **order, **HERE)

    loader = made()
    list(loader) if batches is None else taken(loader, batches)
    checkpoint.save({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
    expected = loader.state_dict()
    again = made()
    checkpoint.load({"loader": again}, checkpoint_id=tmp_path, no_dist=True)
    assert again.state_dict() == expected


@pytest.mark.parametrize("drawn", [0, 1, 310, 311, 312, 2000])
def test_seed_drawn_by_an_iterator_is_returned(drawn: int) -> None:
    torch.manual_seed(drawn)
    saved = generators.now(others=False)[generators.DEFAULT]
    for _ in range(drawn):
        torch.empty((), dtype=torch.int64).random_()
    expected = torch.get_rng_state()
    torch.empty((), dtype=torch.int64).random_()
    generators.put_shared(
        {
            generators.DEFAULT: generators.before_a_seed(
                saved, generators.now(others=False)[generators.DEFAULT]
            )
        }
    )
    found, wanted = torch.rand(700), torch.Generator()
    wanted.set_state(expected)
    assert torch.equal(found, torch.rand(700, generator=wanted))


def test_generator_seeded_after_loading_keeps_its_state() -> None:
    saved = generators.now(others=False)[generators.DEFAULT]
    torch.manual_seed(77)
    found = generators.now(others=False)[generators.DEFAULT]
    assert generators.before_a_seed(saved, found) == found
