"""Batches of our loader against torch's own: ids and bytes, in order, for any number of feeders and ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from batches import (
    Augmented,
    Feedback,
    InBatches,
    Keyed,
    Numbers,
    Plain,
    Whose,
    Zoo,
    as_list,
    epoch,
    noisy_collate,
)
from rig import Rig
from torch.utils import data
from warm import WarmProcess

from dataloaderjob import DataLoader

FEEDERS = (1, 2, 4)


@pytest.fixture(scope="module")
def sockets() -> Iterator[dict[int, str]]:
    """One sidecar for each number of feeders, all over the same four feeder processes."""
    with Rig(feeders=4) as rig:
        yield {4: rig.socket, **{n: rig.another_sidecar(f"s{n}", feeders=n) for n in (1, 2)}}


@pytest.fixture(params=FEEDERS)
def service(request: pytest.FixtureRequest, sockets: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The service with so many feeders."""
    monkeypatch.setenv("DATALOADERJOB_SOCKET", sockets[request.param])
    return int(request.param)


def pair(n: int = 103, **arguments: Callable[[], Any]) -> tuple[data.DataLoader, data.DataLoader]:
    """torch's loader and ours, each with samplers and generators of its own."""
    return tuple(
        kind(Numbers(n), **{name: make() for name, make in arguments.items()})
        for kind in (data.DataLoader, DataLoader)
    )


def const(value: Any) -> Callable[[], Any]:
    return lambda: value


def generator(seed: int) -> Callable[[], torch.Generator]:
    return lambda: torch.Generator().manual_seed(seed)


class EveryThird(data.Sampler):
    """A batch_sampler of the user's own, with batches of different sizes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return -(-self.n // 7)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.n, 7):
            yield list(range(start, min(self.n, start + 1 + start % 9), 3))


class NextOnly(EveryThird):
    """Its iterator has __next__ and nothing else."""

    def __iter__(self) -> Any:
        inner = super().__iter__()
        return type("Bare", (), {"__next__": lambda _: next(inner)})()


class Restarting(EveryThird):
    """Is its own iterator, and begins anew with each iter(), as a wrapper of Lightning's does."""

    def __iter__(self) -> Any:
        self.inner = super().__iter__()
        return self

    def __next__(self) -> list[int]:
        return next(self.inner)


CASES = [
    pytest.param({"batch_size": const(10)}, id="sequential"),
    pytest.param({"batch_size": const(10), "drop_last": const(True)}, id="sequential-drop-last"),
    pytest.param({}, id="defaults"),
    pytest.param(
        {"batch_size": const(16), "shuffle": const(True), "generator": generator(3)},
        id="shuffled-with-generator",
    ),
    pytest.param({"batch_size": const(16), "shuffle": const(True)}, id="shuffled"),
    pytest.param(
        {
            "batch_size": const(7),
            "sampler": lambda: data.SubsetRandomSampler(range(5, 60, 2), generator(4)()),
        },
        id="subset-random",
    ),
    pytest.param(
        {
            "batch_size": const(8),
            "sampler": lambda: data.WeightedRandomSampler(
                torch.arange(103).double(), 150, replacement=True, generator=generator(5)()
            ),
        },
        id="weighted-random",
    ),
    pytest.param(
        {
            "batch_size": const(8),
            "sampler": lambda: data.RandomSampler(range(103), replacement=True, num_samples=333),
            "generator": generator(6),
        },
        id="with-replacement",
    ),
    pytest.param(
        {
            "batch_sampler": lambda: data.BatchSampler(
                data.RandomSampler(range(103), generator=generator(7)()), 9, drop_last=False
            )
        },
        id="batch-sampler",
    ),
    pytest.param({"batch_sampler": lambda: EveryThird(103)}, id="own-batch-sampler"),
    pytest.param({"batch_sampler": lambda: NextOnly(103)}, id="own-bare-batch-sampler"),
    pytest.param({"batch_sampler": lambda: Restarting(103)}, id="own-restarting-batch-sampler"),
    pytest.param(
        {"batch_sampler": lambda: [[3, 1], (5,), torch.tensor([8, 9]), np.arange(3), range(2)]},
        id="batches-of-any-kind",
    ),
    pytest.param(
        {"batch_size": const(4), "sampler": lambda: [np.int64(4), True, -1, 2]}, id="keys-of-any-kind"
    ),
    pytest.param({"batch_size": const(None)}, id="no-batches"),
    pytest.param(
        {"batch_size": const(None), "sampler": lambda: [[1, 2], [3]][0]}, id="no-batches-own-sampler"
    ),
    pytest.param({"batch_size": const(200)}, id="one-ragged-batch"),
    pytest.param({"batch_size": const(5), "sampler": list}, id="nothing"),
]


@pytest.mark.thorough
@pytest.mark.cover(1)
@pytest.mark.parametrize("arguments", CASES)
def test_two_epochs_and_the_generators_afterwards_equal_torchs(service: int, arguments: Any) -> None:
    theirs, ours = pair(**arguments)
    found = []
    for loader in (theirs, ours):
        torch.manual_seed(11)
        epochs = [epoch(loader), epoch(loader)]
        states = [torch.get_rng_state().tolist()]
        states += [loader.generator.get_state().tolist()] if loader.generator is not None else []
        found.append((epochs, states))
    assert len(theirs) == len(ours) == len(found[0][0][0])
    assert found[0] == found[1]


def test_trainers_generators_are_left_unchanged(service: int) -> None:
    """Only the draws that torch makes are made: its workers draw from their own generators, and so do feeders."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    epoch(DataLoader(Augmented(50), batch_size=5))
    epoch(DataLoader(Augmented(50), batch_size=5, num_workers=0))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    found = torch.get_rng_state()
    torch.manual_seed(1)
    for _ in range(2):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(found, torch.get_rng_state())


@pytest.mark.cover(1)
@pytest.mark.parametrize("shuffle", [True, False])
def test_distributed_sampler_over_epochs_equals_torchs(service: int, shuffle: bool) -> None:
    for rank in range(3):
        samplers = [
            data.DistributedSampler(Numbers(100), num_replicas=3, rank=rank, shuffle=shuffle)
            for _ in range(2)
        ]
        loaders = [
            kind(Numbers(100), batch_size=7, sampler=s)
            for kind, s in zip((data.DataLoader, DataLoader), samplers, strict=True)
        ]
        for number in range(3):
            for sampler in samplers:
                sampler.set_epoch(number)
            assert epoch(loaders[0]) == epoch(loaders[1])


@pytest.mark.thorough
def test_subset_and_random_split_equal_torchs(service: int) -> None:
    parts = data.random_split(Numbers(100), [0.7, 0.3], generator=generator(9)())
    for dataset in (
        *parts,
        data.Subset(Numbers(50), [5, 3, 44, 3]),
        data.ConcatDataset([Numbers(9), *parts]),
    ):
        loaders = [
            kind(dataset, batch_size=4, shuffle=True, generator=generator(2)())
            for kind in (data.DataLoader, DataLoader)
        ]
        assert epoch(loaders[0]) == epoch(loaders[1])


def test_every_kind_of_leaf_and_container_equals_torchs(service: int) -> None:
    """All dtypes with all bit patterns, of no size too; Mapping subclasses, named tuples, dataclasses, strings."""
    for options in ({"batch_size": 3, "collate_fn": as_list}, {"batch_size": None, "collate_fn": as_list}):
        assert epoch(data.DataLoader(Zoo(20), **options)) == epoch(DataLoader(Zoo(20), **options))


def test_default_collate_of_every_supported_type_equals_torchs(service: int) -> None:
    assert epoch(data.DataLoader(Plain(23), batch_size=5)) == epoch(DataLoader(Plain(23), batch_size=5))


KEYS = [
    "a",
    "ä\ud800",
    b"b",
    ("a", 1),
    (2, (3.5, None)),
    frozenset({4}),
    2**70,
    -(2**63),
    1.5,
    np.float32(2),
    torch.tensor(3),
]


@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_keys_of_every_kind_arrive_unchanged(service: int, batch_size: int | None) -> None:
    loaders = [
        kind(Keyed(), batch_size=batch_size, sampler=KEYS, collate_fn=as_list)
        for kind in (data.DataLoader, DataLoader)
    ]
    assert epoch(loaders[0]) == epoch(loaders[1])


@pytest.mark.thorough
@pytest.mark.cover(1)
@pytest.mark.parametrize("batch", [None, [], (), {}, 0, "", b"", torch.empty(0), [[], {}], False])
def test_empty_and_falsy_batches_arrive(service: int, batch: Any) -> None:
    loaders = [
        kind(Numbers(9), batch_size=2, collate_fn=lambda _: batch) for kind in (data.DataLoader, DataLoader)
    ]
    assert epoch(loaders[0]) == epoch(loaders[1])


def test_batches_of_no_samples_arrive_too(service: int) -> None:
    loaders = [
        kind(Numbers(9), batch_sampler=[[], [1], [], []], collate_fn=as_list)
        for kind in (data.DataLoader, DataLoader)
    ]
    assert epoch(loaders[0]) == epoch(loaders[1])


def test_feeders_all_take_part(service: int) -> None:
    assert len({pid for pid, _ in DataLoader(Whose(60 * service), batch_size=None)}) == service


def test_strides_and_requires_grad_arrive(service: int) -> None:
    (found,) = next(iter(DataLoader(Zoo(1), collate_fn=as_list)))
    assert found["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert found["channels_last"].stride() == Zoo(1)[0]["channels_last"].stride()


@pytest.mark.cover(1)
@pytest.mark.parametrize("collate_fn", [None, noisy_collate], ids=["default-collate", "drawing-collate"])
@pytest.mark.parametrize("kind", [Augmented, InBatches])
def test_random_augmentation_is_independent_of_the_number_of_feeders(
    service: int, kind: Any, collate_fn: Any
) -> None:
    def both(**options: Any) -> list[Any]:
        torch.manual_seed(5)
        loader = DataLoader(kind(77), batch_size=8, shuffle=True, collate_fn=collate_fn, **options)
        return [epoch(loader), epoch(loader)]

    first, second = both()
    assert [first, second] == both(num_workers=0)
    assert first != second


def test_two_draws_of_one_index_get_different_augmentation(service: int) -> None:
    for options in ({}, {"num_workers": 0}):
        loader = DataLoader(Augmented(10), batch_size=2, sampler=[3, 3, 3, 3], **options)
        noise = torch.cat([batch[1] for batch in loader])
        assert len(torch.unique(noise, dim=0)) == 4


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "prefetch_factor": 3}], ids=str
)
def test_feedback_sampler_is_read_as_far_ahead_as_by_torch(service: int, options: dict[str, int]) -> None:
    def order(kind: type, **options: Any) -> list[list[int]]:
        sampler, taken = Feedback(50, 240), []
        for step, batch in enumerate(kind(Numbers(50), batch_size=4, sampler=sampler, **options)):
            sampler.told(batch[0].tolist(), step)
            taken.append(batch[0].tolist())
        return taken

    assert order(DataLoader, **options) == order(DataLoader, **options) == order(data.DataLoader, **options)


@pytest.mark.parametrize("ahead", [16, 6, 1])
def test_feedback_sampler_is_read_as_far_ahead_as_the_job_configures(
    service: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATALOADERJOB_PREFETCH", str(ahead))
    sampler = Feedback(50, 240)
    loader = DataLoader(Numbers(50), batch_size=1, sampler=sampler)
    iterator = iter(loader)
    asked = iterator._drawn
    next(iterator)
    assert (asked, iterator._drawn) == (ahead, ahead + 1)


class Given(Numbers):
    """Says what it is asked with."""

    def __getitem__(self, key: Any) -> Any:
        return type(key).__name__, np.asarray(key).tolist()


class GivenTogether(Given):
    def __getitems__(self, keys: Any) -> Any:
        return [(type(keys).__name__, [self[key] for key in keys])]


BATCHES_OF_KEYS: list[Any] = [
    [3, 1], (5, 2), range(3), np.arange(4), np.arange(2, dtype=np.int16), torch.tensor([8, 9]), "ab",
    [np.int64(3), np.int64(-4)], [np.int64(3), 4], [torch.tensor(3)], [True, 1],
]  # fmt: skip


@pytest.mark.parametrize("dataset", [Given(), GivenTogether()], ids=["one-by-one", "together"])
def test_batch_of_a_batch_sampler_arrives_as_the_same_kind_of_object(service: int, dataset: Any) -> None:
    loaders = [
        kind(dataset, batch_sampler=BATCHES_OF_KEYS, collate_fn=as_list, num_workers=n)
        for kind, n in ((data.DataLoader, 0), (DataLoader, 0), (DataLoader, 2))
    ]
    theirs, here, ours = map(epoch, loaders)
    assert theirs == here == ours


def test_persistent_workers_keep_torchs_order_and_augment_each_epoch(service: int) -> None:
    def three_epochs(kind: type, dataset: Any) -> list[Any]:
        torch.manual_seed(8)
        loader = kind(dataset, batch_size=6, shuffle=True, num_workers=1, persistent_workers=True)
        return [epoch(loader) for _ in range(3)]

    assert three_epochs(DataLoader, Numbers(40)) == three_epochs(data.DataLoader, Numbers(40))
    runs = three_epochs(DataLoader, Augmented(40))
    assert runs == three_epochs(DataLoader, Augmented(40))
    assert len(set(map(repr, runs))) == 3


RANK_SCRIPT = """
import json, os, sys
import torch
from torch.utils import data
from batches import Augmented, Numbers, epoch
from dataloaderjob import DataLoader
import hashlib

def digests(kind, dataset, **options):
    sampler = data.DistributedSampler(dataset, num_replicas=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]))
    loader = kind(dataset, batch_size=5, sampler=sampler, **options)
    found = []
    for number in range(3):
        sampler.set_epoch(number)
        torch.manual_seed(number)
        found.append(hashlib.sha256(repr(epoch(loader)).encode()).hexdigest())
    return found

for path in sys.argv[1:]:
    os.environ["DATALOADERJOB_SOCKET"] = path
    ours, theirs = (digests(kind, Numbers(101)) for kind in (DataLoader, data.DataLoader))
    noisy, reference = digests(DataLoader, Augmented(101)), digests(DataLoader, Augmented(101), num_workers=0)
    print(json.dumps([ours == theirs, noisy == reference, ours + noisy]), flush=True)
"""


def test_two_ranks_each_get_torchs_batches(sockets: dict[int, str]) -> None:
    with ranks(2, RANK_SCRIPT, *(sockets[n] for n in FEEDERS)) as processes:
        told = [[json.loads(line) for line in p.communicate(timeout=120)[0].splitlines()] for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    for rank in told:
        assert [line[:2] for line in rank] == [[True, True]] * len(FEEDERS)
        assert rank[0][2] == rank[1][2] == rank[2][2], "the same for any number of feeders"
    assert told[0][0][2] != told[1][0][2], "each rank has its own part"


@contextmanager
def ranks(world: int, script: str, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    path = os.pathsep.join(p for p in sys.path if p)
    processes = [
        WarmProcess(
            ["-c", script, *arguments],
            env={**os.environ, "PYTHONPATH": path, "RANK": str(rank), "WORLD_SIZE": str(world)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
