"""IterableDatasets whose shards have different lengths, and what torch's own loader makes of them."""

from __future__ import annotations

import hashlib
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed import get_rank, get_world_size, is_initialized
from torch.utils.data import IterableDataset, get_worker_info

from dataloaderjob import DataLoader
from dataloaderjob.batches.digest import digest_update

LENGTHS = (37, 5, 22, 60, 1, 13, 44)


class Shards(IterableDataset):
    """Shard k belongs to one worker of one rank, as most datasets have it. Draws from all three generators."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, pause_s: float = 0.0) -> None:
        self.lengths, self.pause_s = lengths, pause_s

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world = self.rank()
        for shard in range(rank * workers + worker, len(self.lengths), world * workers):
            for number in range(self.lengths[shard]):
                if self.pause_s:
                    time.sleep(self.pause_s)
                noise = torch.rand(16, 16) + random.random() + float(np.random.rand())
                yield {"x": noise, "id": shard * 1000 + number}

    def rank(self) -> tuple[int, int]:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class ByGroup(Shards):
    """The rank as torch.distributed has it."""

    def rank(self) -> tuple[int, int]:
        distributed = torch.distributed
        return (
            (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
        )


class ByNames(Shards):
    """As many write it: names that are bound before a feeder knows whose rank it works for, and a group."""

    def rank(self) -> tuple[int, int]:
        return (get_rank(group=None), get_world_size()) if is_initialized() else (0, 1)


class Failing(Shards):
    """Raises once, in the middle of a shard; the generator ends by it."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in super().__iter__():
            if sample["id"] == 3007:
                raise ValueError("shard 3 is damaged")
            yield sample


class Counting(IterableDataset):
    """An iterator of a class, which goes on after what it raised."""

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 5:
            raise KeyError("the fifth")
        if self.at > 12:
            raise StopIteration
        return self.at


class Deadly(Shards):
    """Ends the process that makes its twentieth sample."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, sample in enumerate(super().__iter__()):
            if number == 20:
                os._exit(3)
            yield sample


def stopping_collate(samples: list[Any]) -> Any:
    """Raises what ends an iterator. Torch's worker ends, too; a slot goes on, after an error."""
    if samples[0]["id"] >= 3020:
        raise StopIteration
    return torch.utils.data.default_collate(samples)


def digests_of(loader: Any) -> list[str]:
    """One for each batch; where next() raised, the type of the error."""
    found: list[str] = []
    iterator = iter(loader)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return found
        except Exception as exc:
            found.append(type(exc).__name__)
            continue
        hasher = hashlib.sha256()
        digest_update(hasher, batch)
        found.append(hasher.hexdigest()[:16])


class Position:
    """An iterator with a state: where it is in its samples."""

    def __init__(self, samples: list[int], log: str = "") -> None:
        self.samples, self.at, self.log = samples, 0, log

    def __iter__(self) -> Position:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.at == len(self.samples):
            raise StopIteration
        self.at += 1
        if self.log:
            with open(self.log, "a") as out:
                out.write(f"{self.samples[self.at - 1]}\n")
        time.sleep(0.001)
        return {"x": torch.rand(4) + random.random(), "id": self.samples[self.at - 1]}

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class WithState(IterableDataset):
    """Its iterator has the state. `log`: a file with a line for each sample that was made."""

    def __init__(self, samples: int = 400, log: str = "") -> None:
        self.samples, self.log = samples, log

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return Position(list(range(worker, self.samples, workers)), self.log)


class WithOwnState(WithState):
    """The dataset has the state, and a generator for an iterator, as HF's datasets."""

    def __init__(self, samples: int = 400, log: str = "") -> None:
        super().__init__(samples, log)
        self.at = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        inner = super().__iter__()
        inner.at = self.at
        for sample in inner:
            self.at = inner.at
            yield sample
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Shuffled(WithOwnState):
    """Its state has the place in its source, and not what lies in the shuffle buffer."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        held: list[dict[str, Any]] = []
        for sample in super().__iter__():
            held.append(sample)
            if len(held) > 20:
                yield held.pop(random.randrange(len(held)))
        yield from held


class ByTheClock(WithState):
    """Not deterministic, whatever its seeds."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield {**sample, "x": time.time_ns()}


class LargeState(WithOwnState):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "more": os.urandom(1 << 21)}


class BadState(WithOwnState):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("no state today")


def both(make: Callable[[], Any], **more: Any) -> tuple[list[str], list[str]]:
    """Digests of torch's batches, and of ours, each of a dataset of its own."""
    found = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(1)
        with warnings.catch_warnings(action="ignore"):
            found.append(digests_of(kind(make(), num_workers=2, **{"batch_size": 4, **more})))
    return found[0], found[1]


def gone_on_with(make: Callable[[], Any], batches: int, **more: Any) -> list[str]:
    """Digests of ours of what follows so many batches, from a loader that begins at the state there."""

    def loader() -> DataLoader[Any]:
        torch.manual_seed(1)
        with warnings.catch_warnings(action="ignore"):
            return DataLoader(make(), num_workers=2, **{"batch_size": 4, **more})

    state = state_after(loader(), batches)
    second = loader()
    second.load_state_dict(state)
    return digests_of(second)


def state_after(loader: DataLoader[Any], batches: int) -> dict[str, Any]:
    """The state of a loader of which so many batches of an epoch were taken."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()
