"""torch's data pipes, and streams that are longer than they say, behave over slots as over torch's workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rig import Rig
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from dataloaderjob import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:.*datapipes.*")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


def negated(x: int) -> int:
    return -x


def is_even(x: int) -> bool:
    return x % 2 == 0


PIPES: dict[str, Callable[[], Any]] = {
    "dealt": lambda: IterableWrapper(range(30)).sharding_filter(),
    "not dealt": lambda: IterableWrapper(range(10)).map(negated),
    "shuffled and dealt": lambda: IterableWrapper(range(40)).shuffle().sharding_filter().map(negated),
    "dealt and shuffled": lambda: IterableWrapper(range(40)).sharding_filter().shuffle().filter(is_even),
    "batched": lambda: IterableWrapper(range(30)).shuffle().sharding_filter().batch(3).map(torch.tensor),
    "map-style": lambda: SequenceWrapper(range(20)).map(negated),
}


def epochs(kind: Any, pipe: Any, workers: int, **more: Any) -> list[list[Any]]:
    torch.manual_seed(4)
    loader = kind(pipe, batch_size=2, num_workers=workers, **more)
    return [[batch.tolist() for batch in loader] for _ in range(3)]


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("make", PIPES.values(), ids=PIPES)
def test_a_pipe_is_dealt_and_seeded_as_by_torchs_workers(
    rig: Rig, make: Callable[[], Any], workers: int
) -> None:
    expected = epochs(torch.utils.data.DataLoader, make(), workers)
    assert epochs(DataLoader, make(), workers) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["shuffled and dealt", "dealt and shuffled"])
def test_pipe_with_persistent_workers_reshuffles_each_epoch(rig: Rig, name: str) -> None:
    expected = epochs(torch.utils.data.DataLoader, PIPES[name](), 2, persistent_workers=True)
    found = epochs(DataLoader, PIPES[name](), 2, persistent_workers=True)
    assert found == expected
    assert found[0] != found[1]


def test_users_worker_init_fn_runs_after_sharding_is_applied(
    rig: Rig, capfd: pytest.CaptureFixture[str]
) -> None:
    def init(worker: int) -> None:
        assert len(list(torch.utils.data.get_worker_info().dataset)) == 2, worker

    loader = DataLoader(IterableWrapper(range(4)).sharding_filter(), num_workers=2, worker_init_fn=init)
    assert sorted(int(batch) for batch in loader) == [0, 1, 2, 3]


class Long(IterableDataset):
    """Every slot gives all of it."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize("workers", [1, 2])
def test_stream_longer_than_its_len_warns_once(rig: Rig, workers: int) -> None:
    loader = DataLoader(Long(), batch_size=2, num_workers=workers)
    assert len(loader) == 4
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert sum(1 for _ in loader) == 4 * workers
    told = [
        str(one.message)
        for one in caught
        if "the dataset's len() is 8, but it yields more" in str(one.message)
    ]
    assert len(told) == (workers > 1)
    assert all("get_worker_info()" in text for text in told)
