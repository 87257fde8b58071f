"""The samplers under loaders of others: torch's, torchdata's StatefulDataLoader, Accelerate and our own."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, Dataset
from torch.utils.data import DataLoader as TorchLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import dataloaderjob
from dataloaderjob import (
    ElasticBalancedBatchSampler,
    ElasticDistributedSampler,
    ElasticMixtureSampler,
    ElasticTokenBatchSampler,
    ElasticWeightedSampler,
)

N = 103
LENGTHS = [1 + 7 * i % 31 for i in range(N)]


class Keys(Dataset):
    """Sample i is i."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> int:
        return i


KINDS = {
    "distributed": lambda world, rank: ElasticDistributedSampler(Keys(), world, rank),
    "weighted": lambda world, rank: ElasticWeightedSampler(LENGTHS, N, world, rank),
    "mixture": lambda world, rank: ElasticMixtureSampler([range(40), range(63)], [1, 1], N, world, rank),
    "balanced": lambda world, rank: ElasticBalancedBatchSampler(LENGTHS, 4, world, rank),
    "tokens": lambda world, rank: ElasticTokenBatchSampler(LENGTHS, 80, world, rank, look_ahead=32),
}
# Workers are ahead in one way for all kinds: a sampler and a batch sampler show it.
ahead = pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in KINDS), ("mixture", 2), ("tokens", 2)]
)
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def arguments(kind: str, world: int = 1, rank: int = 0) -> dict[str, Any]:
    sampler = KINDS[kind](world, rank)
    batches = kind in ("balanced", "tokens")
    return {"batch_sampler": sampler} if batches else {"batch_size": 4, "sampler": sampler}


def sampler_of(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)


def listed(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def expected(kind: str, *epochs: int) -> list[list[list[int]]]:
    """The batches of these epochs, by torch's own loader."""
    loader = TorchLoader(Keys(), **arguments(kind))
    found = []
    for epoch in epochs:
        sampler_of(loader).set_epoch(epoch)
        found.append(listed(loader))
    return found


@ahead
def test_torchs_loader_and_ours_give_the_sampler_s_batches(kind: str, workers: int) -> None:
    given = arguments(kind)
    sampler = given.get("sampler", given.get("batch_sampler"))
    whole = expected(kind, 0)[0]
    if kind in ("balanced", "tokens"):
        assert whole == list(sampler)
    else:
        assert list(itertools.chain(*whole)) == list(sampler)
    loader = TorchLoader if workers else dataloaderjob.DataLoader
    assert listed(loader(Keys(), num_workers=workers, **arguments(kind))) == whole


def test_loaded_position_survives_the_two_iterators_of_torchs_workers() -> None:
    sampler = ElasticDistributedSampler(Keys(), 1, 0)
    whole = list(sampler)
    sampler.load_state_dict({**sampler.state_dict(), "position": 90})
    loader = TorchLoader(Keys(), batch_size=None, sampler=sampler, num_workers=1)
    assert [list(map(int, loader)), list(map(int, loader))] == [whole[90:], whole]


# torchdata


def stateful(
    kind: str, workers: int = 0, world: int = 1, rank: int = 0, **options: Any
) -> StatefulDataLoader:
    return StatefulDataLoader(Keys(), num_workers=workers, **arguments(kind, world, rank), **options)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint brings it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file)
    return found


@ahead
def test_torchdata_resumes_exactly_in_mid_epoch_despite_prefetching(kind: str, workers: int) -> None:
    whole, following = expected(kind, 2, 3)
    old, new = stateful(kind, workers), stateful(kind, workers)
    sampler_of(old).set_epoch(2)
    batches = iter(old)
    taken = [next(batches).tolist() for _ in range(7)]
    new.load_state_dict(plain(old.state_dict()))
    assert taken + listed(new) == whole
    sampler_of(new).set_epoch(3)
    assert listed(new) == following


@ahead
@pytest.mark.parametrize("stopped", ["in the loop", "after it"])
def test_torchdata_continues_with_the_next_epoch_after_the_end_of_one(
    kind: str, workers: int, stopped: str
) -> None:
    whole, following = expected(kind, 0, 1)
    old, new = stateful(kind, workers), stateful(kind, workers)
    batches = iter(old)
    assert [next(batches).tolist() for _ in whole] == whole
    if stopped == "after it":
        assert next(batches, None) is None
    new.load_state_dict(plain(old.state_dict()))
    if stopped == "in the loop":
        assert listed(new) == []
    sampler_of(new).set_epoch(1)
    assert listed(new) == following


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_resumes_samples_without_batches(workers: int) -> None:
    whole = list(ElasticDistributedSampler(Keys(), 1, 0))
    loaders = [
        StatefulDataLoader(
            Keys(), batch_size=None, sampler=ElasticDistributedSampler(Keys(), 1, 0), num_workers=workers
        )
        for _ in range(2)
    ]
    samples = iter(loaders[0])
    taken = [int(next(samples)) for _ in range(11)]
    loaders[1].load_state_dict(plain(loaders[0].state_dict()))
    assert taken + [int(sample) for sample in loaders[1]] == whole


def test_torchdata_state_of_any_rank_fits_another_world_size() -> None:
    """2 ranks of 4 samples, then 4 of 2."""

    def ranks(world: int) -> list[StatefulDataLoader]:
        return [
            StatefulDataLoader(
                Keys(),
                batch_size=8 // world,
                sampler=ElasticDistributedSampler(Keys(), world, rank, global_batch_size=8),
            )
            for rank in range(world)
        ]

    def steps(loaders: list[StatefulDataLoader], count: int) -> Iterator[list[int]]:
        for step in itertools.islice(zip(*loaders, strict=True), count):
            yield sorted(itertools.chain(*listed(step)))

    (one,) = ranks(1)
    whole = [sorted(batch) for batch in listed(one)]
    two, four = ranks(2), ranks(4)
    found = list(steps(two, 5))
    states = [loader.state_dict() for loader in two]
    assert states[0] == states[1]
    for loader in four:
        loader.load_state_dict(plain(states[1]))
    assert found + list(steps(four, 99)) == whole


# Accelerate


def prepared(kind: str, workers: int) -> Any:
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    return accelerator.prepare(stateful(kind, workers))


@pytest.mark.parametrize(("kind", "workers"), [("distributed", 0), ("mixture", 0), ("distributed", 2)])
def test_accelerate_resumes_exactly_although_it_forgets_the_epoch(kind: str, workers: int) -> None:
    """It counts epochs by itself, from 0 on in a new process, and is one batch ahead."""
    epochs = expected(kind, 0, 1, 2, 3)
    old, new = prepared(kind, workers), prepared(kind, workers)
    assert [listed(old), listed(old)] == epochs[:2]
    taken = [batch.tolist() for batch in itertools.islice(iter(old), 7)]
    new.load_state_dict(plain(old.state_dict()))
    assert taken + listed(new) == epochs[2]
    new.set_epoch(3)
    assert listed(new) == epochs[3]


def test_accelerate_keeps_the_state_of_a_registered_sampler(tmp_path: Any) -> None:
    """For loaders that it does not prepare, such as ours; every rank loads what rank 0 saved."""
    old, new = (ElasticDistributedSampler(Keys(), 4, 1) for _ in range(2))
    list(itertools.islice(iter(old), 5))
    for sampler, action in ((old, "save_state"), (new, "load_state")):
        accelerator = Accelerator(cpu=True)
        accelerator.register_for_checkpointing(sampler)
        getattr(accelerator, action)(str(tmp_path / "checkpoint"))
    assert new.state_dict() == old.state_dict()
    assert json.loads(json.dumps(new.state_dict()))["position"] == 20


@pytest.mark.parametrize("world", [2, 4])
def test_accelerates_shards_are_the_global_batches_in_any_world(world: int) -> None:
    """Its ranks share a sampler made for one rank, and skip batches where they resume."""
    sampler = ElasticDistributedSampler(Keys(), 1, 0, tail="drop", global_batch_size=8)
    whole = [sorted(batch) for batch in BatchSampler(sampler, 8, drop_last=False)]
    shards = [
        BatchSamplerShard(BatchSampler(sampler, 8 // world, drop_last=False), world, rank)
        for rank in range(world)
    ]
    rest = zip(*(itertools.islice(shard, 5, None) for shard in shards), strict=True)
    assert [sorted(itertools.chain(*step)) for step in rest] == whole[5:]
