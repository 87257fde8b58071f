"""Batch samplers run unchanged under the service: Hugging Face's that rebalances, a user's own, and ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches import Augmented, epoch, ids
from rig import Rig
from torch.utils import data
from transformers.trainer_pt_utils import BatchRebalanceSampler

from dataloaderjob import (
    DataLoader,
    ElasticBalancedBatchSampler,
    ElasticDistributedSampler,
    ElasticTokenBatchSampler,
)

N, RANKS = 103, 2
LENGTHS = [1 + 37 * i % 211 for i in range(N)]


@pytest.fixture(scope="module", autouse=True)
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


class Rebalanced(data.Sampler):
    """As users write it: the shuffled epoch in global batches, their samples dealt out by length, back and forth."""

    def __init__(self, lengths: list[int], per_rank: int, rank: int) -> None:
        self.lengths, self.per_rank, self.rank = lengths, per_rank, rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths) // (self.per_rank * RANKS)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(
            len(self.lengths), generator=torch.Generator().manual_seed(self.epoch)
        ).tolist()
        for step in range(len(self)):
            batch = order[step * self.per_rank * RANKS :][: self.per_rank * RANKS]
            batch.sort(key=lambda i: self.lengths[i])
            yield [
                pair[(self.rank + at) % RANKS]
                for at, pair in enumerate(zip(batch[::2], batch[1::2], strict=True))
            ]


SAMPLERS = {
    "hugging-face": lambda rank: BatchRebalanceSampler(LENGTHS, 16, RANKS, grad_accum=2, rank=rank),
    "hugging-face-with-the-tail": lambda rank: BatchRebalanceSampler(
        LENGTHS, 16, RANKS, 1, rank=rank, drop_last=False
    ),
    "a-user-s": lambda rank: Rebalanced(LENGTHS, 6, rank),
    "balanced": lambda rank: ElasticBalancedBatchSampler(LENGTHS, 12, RANKS, rank, look_ahead=2),
    "tokens": lambda rank: ElasticTokenBatchSampler(LENGTHS, 900, RANKS, rank),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_batch_sampler_runs_unchanged_in_each_epoch(kind: str) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}
    for rank in range(RANKS):
        ours, reference, torchs = (
            make(Augmented(N), batch_sampler=SAMPLERS[kind](rank), **options)
            for make, options in ((DataLoader, {}), (DataLoader, {"num_workers": 0}), (data.DataLoader, {}))
        )
        for number in range(2):
            for loader in (ours, reference, torchs):
                loader.batch_sampler.set_epoch(number)
            batches = [batch[0].tolist() for batch in ours]
            assert batches == [batch[0].tolist() for batch in torchs] == list(torchs.batch_sampler)
            seen[number] += itertools.chain(*batches)
            torch.manual_seed(number)
            drawn = epoch(ours)
            torch.manual_seed(number)
            assert drawn == epoch(reference)
    assert seen[0] != seen[1]
    for found in seen.values():
        assert len(set(found)) > N - 16


def test_hugging_face_sampler_gives_ranks_equal_steps_without_repeats() -> None:
    loaders = [
        DataLoader(Augmented(N), batch_sampler=SAMPLERS["hugging-face"](rank)) for rank in range(RANKS)
    ]
    steps = list(zip(*loaders, strict=True))
    found = [int(i) for step in steps for batch in step for i in batch[0]]
    assert len(set(found)) == len(found) == 96


@pytest.mark.parametrize("workers", [None, 0])
def test_different_world_size_resumes_under_the_loader_where_it_stopped(workers: Any) -> None:
    """The loader draws ahead, so the position is that of the batches that were trained on."""

    def ranks(world: int, position: int = 0) -> list[DataLoader[Any]]:
        made = []
        for rank in range(world):
            sampler = ElasticDistributedSampler(range(N), world, rank, global_batch_size=12)
            sampler.load_state_dict({**sampler.state_dict(), "position": position})
            made.append(
                DataLoader(Augmented(N), batch_size=12 // world, sampler=sampler, num_workers=workers)
            )
        return made

    def steps(loaders: list[DataLoader[Any]]) -> list[list[int]]:
        return [sorted(itertools.chain(*step)) for step in zip(*map(in_batches, loaders), strict=True)]

    def in_batches(loader: DataLoader[Any]) -> list[list[int]]:
        return [batch[0].tolist() for batch in loader]

    whole = steps(ranks(1))
    assert [found for world in (2, 3, 4) for found in steps(ranks(world))[:3]] == whole[:3] * 3
    assert [steps(ranks(world, 36)) for world in (2, 3, 4)] == [whole[3:]] * 3
    assert sorted(set(itertools.chain(*whole))) == sorted(set(ids(ranks(1)[0]))) == list(range(N))
