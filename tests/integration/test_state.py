"""A loader's state over the service: resumed at every step, with other numbers of feeders, with whatever else is on."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches import Augmented, Numbers, fingerprint, ids
from resuming import BATCH, LOADERS, STEPS, N, epochs_of, seed, stopped, whole
from rig import Rig
from torch.utils import data

from dataloaderjob import DataLoader, InputError
from dataloaderjob.trainer.resume import probing


@pytest.fixture(scope="module")
def rigs() -> Iterator[dict[int, Rig]]:
    """Services of one, two and three feeders."""
    with Rig(feeders=1) as one, Rig(feeders=2) as two, Rig(feeders=3) as three:
        yield {1: one, 2: two, 3: three}


@pytest.fixture(params=[1, 2, 3])
def feeders(rigs: dict[int, Rig], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("DATALOADERJOB_SOCKET", rigs[request.param].socket)
    return int(request.param)


@pytest.fixture
def service(rigs: dict[int, Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALOADERJOB_SOCKET", rigs[2].socket)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.quick(
    "shuffled",
    "elastic",
    "a sampler with state",
    "a sampler without state",
    "a batch sampler",
    others="nightly",
)
def test_stopped_run_resumes_as_if_uninterrupted(service: None, name: str) -> None:
    expected = whole(LOADERS[name], 2)
    for epoch, step in ((0, 1), (1, 5), (0, STEPS)):
        assert stopped(LOADERS[name], epoch, step, 2, {}, {}) == expected, step


LENGTH = 24
"""Batches of an epoch that is resumed at every step; each resume loads the rest of it."""

WITH = {
    "torch's window": {"num_workers": 2},
    "a wide window": {"num_workers": 2, "prefetch_factor": 20},
    "one feeder for all epochs": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("option", WITH)
@pytest.mark.parametrize(
    "name", ["shuffled", "shuffled by a generator", "distributed", "a sampler with state"]
)
@pytest.mark.quick("shuffled-torch's window", "distributed-one feeder for all epochs")
def test_resuming_works_with_every_option(service: None, name: str, option: str) -> None:
    options = WITH[option]
    expected = whole(LOADERS[name], 3, **options)
    for epoch, step in ((0, 1), (0, STEPS), (1, 4), (2, STEPS)):
        assert stopped(LOADERS[name], epoch, step, 3, options, options) == expected, (epoch, step)


def short(ranks: int, rank: int) -> DataLoader:
    """A loader of LENGTH batches; the seed is that of the process."""
    seed(5)
    dataset = Augmented(LENGTH * ranks)
    return DataLoader(
        dataset, 1, sampler=data.DistributedSampler(dataset, ranks, rank, seed=1), dataset_id="short"
    )


@pytest.mark.cover(1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.quick("2")
def test_any_number_of_feeders_resumes_at_every_step_of_an_epoch(
    feeders: int, rigs: dict[int, Rig], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [[fingerprint(batch) for batch in short(ranks, rank)] for rank in range(ranks)]
    before = iter(short(ranks, 0))
    for step in range(LENGTH + 1):
        state = json.dumps(before.state_dict())
        rank = step % ranks
        monkeypatch.setenv("DATALOADERJOB_SOCKET", rigs[1 + (feeders + step) % 3].socket)
        again = short(ranks, rank)
        again.load_state_dict(json.loads(state))
        assert [fingerprint(batch) for batch in again] == expected[rank][step:], step
        if step < LENGTH:
            assert fingerprint(next(before)) == expected[0][step]


def test_in_process_and_service_states_are_interchangeable(service: None) -> None:
    expected = whole(LOADERS["distributed"], 2)
    here = {"num_workers": 0}
    assert stopped(LOADERS["distributed"], 0, 3, 2, {}, here) == expected
    assert stopped(LOADERS["distributed"], 0, 3, 2, here, {}) == expected


def test_the_state_outlives_its_iterator(service: None) -> None:
    loader = DataLoader(Numbers(N), BATCH)
    for step, _batch in enumerate(loader, start=1):
        if step == 5:
            break
    del _batch
    gc.collect()
    assert (loader.state_dict()["batches"], loader.state_dict()["samples"]) == (5, 15)


def test_failed_batch_is_not_made_again(service: None) -> None:
    class Broken(Numbers):
        def __getitem__(self, i: int) -> Any:
            if i == 4:
                raise KeyError("no such sample")
            return super().__getitem__(i)

    loader = DataLoader(Broken(N), BATCH)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyError, match="no such sample"):
        next(iterator)
    again = DataLoader(Broken(N), BATCH)
    again.load_state_dict(loader.state_dict())
    assert ids(again) == list(range(6, N))


def test_epoch_set_after_iter_takes_effect(service: None) -> None:
    dataset = Numbers(40)
    loader = DataLoader(dataset, 4, sampler=data.DistributedSampler(dataset, 2, 0, seed=1))
    loader.sampler.set_epoch(2)
    expected = ids(loader)
    loader.sampler.set_epoch(0)
    iterator = iter(loader)
    loader.sampler.set_epoch(2)
    assert ids(iterator) == expected
    assert loader.state_dict()["epoch"] == 2


def test_state_of_another_dataset_is_detected_by_samples_from_feeders(
    service: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "PROBE_S", 60.0)  # a probe that comes late proves nothing
    first = DataLoader(Augmented(N), BATCH)
    next(iter(first))
    second = DataLoader(Augmented(N, width=8), BATCH)
    second.load_state_dict(first.state_dict())
    with pytest.raises(InputError, match="sample 0 differs"):
        iter(second)


def test_skip_passes_over_batches_without_making_them(service: None) -> None:
    loader = DataLoader(Numbers(N), BATCH)
    loader.skip(6)
    assert ids(loader) == list(range(18, N))


def test_keys_that_are_not_integers_are_counted_too(service: None) -> None:
    def make() -> DataLoader:
        return DataLoader(
            {f"k{i}": torch.tensor(i) for i in range(9)}, 2, sampler=[f"k{i}" for i in range(9)]
        )

    iterator = iter(make())
    for _ in range(2):
        next(iterator)
    again = make()
    again.load_state_dict(iterator.state_dict())
    assert [b.tolist() for b in again] == [[4, 5], [6, 7], [8]]


@pytest.mark.thorough
def test_two_ranks_resume_from_the_first_ranks_state(service: None) -> None:
    def make(rank: int) -> DataLoader:
        dataset = Augmented(100)
        return DataLoader(dataset, 1, sampler=data.DistributedSampler(dataset, 2, rank, seed=1))

    expected = []
    for rank in range(2):
        seed(5)
        expected.append([fingerprint(batch) for batch in make(rank)])
    for step in (1, 17, 49, 50):
        seed(5)
        iterator = iter(make(0))
        for _ in range(step):
            next(iterator)
        state = iterator.state_dict()
        for rank in range(2):
            again = make(rank)
            again.load_state_dict(state)
            assert [fingerprint(batch) for batch in again] == expected[rank][step:]


@pytest.mark.thorough
def test_a_state_between_epochs_gives_the_next_epoch(service: None) -> None:
    expected = whole(LOADERS["shuffled"], 3)
    seed(5)
    _, state = epochs_of(LOADERS["shuffled"](), range(2))
    seed(8)
    loader = LOADERS["shuffled"]()
    loader.load_state_dict(json.loads(state))
    assert epochs_of(loader, range(2, 3))[0] == expected[2:]
