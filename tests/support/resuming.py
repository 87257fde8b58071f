"""Loaders that are stopped and gone on with: the rest of the run beside that of a run that was not stopped."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from batches import Augmented, fingerprint
from torch.utils import data

from dataloaderjob import DataLoader, ElasticDistributedSampler

N, BATCH = 23, 3
STEPS = -(-N // BATCH)


class Counting(data.Sampler):
    """Has state, and another order at each iter()."""

    def __init__(self, n: int) -> None:
        self.n, self.round, self.given = n, 0, 0
        self._loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self._loaded:
            self.round, self.given = self.round + 1, 0
        self._loaded = False
        order = np.random.RandomState(self.round).permutation(self.n).tolist()
        while self.given < self.n:
            self.given += 1
            yield order[self.given - 1]

    def __len__(self) -> int:
        return self.n

    def state_dict(self) -> dict[str, int]:
        return {"round": self.round, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.round, self.given, self._loaded = state["round"], state["given"], True


class Shuffling(data.Sampler):
    """Has no state, and draws from Python's generator."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.n))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.n


def with_generator(**options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Augmented(N), BATCH, shuffle=True, generator=generator, **options)


def distributed(**options: Any) -> DataLoader:
    dataset = Augmented(2 * N)
    return DataLoader(dataset, BATCH, sampler=data.DistributedSampler(dataset, 2, 1, seed=4), **options)


def elastic(**options: Any) -> DataLoader:
    dataset = Augmented(2 * N)
    return DataLoader(dataset, BATCH, sampler=ElasticDistributedSampler(dataset, 2, 1, seed=4), **options)


SEVERAL_RANKS = (distributed, elastic)
"""Of these, torch's generator is left to those who train."""
LOADERS: dict[str, Callable[..., DataLoader]] = {
    "in sequence": lambda **o: DataLoader(Augmented(N), BATCH, **o),
    "shuffled": lambda **o: DataLoader(Augmented(N), BATCH, shuffle=True, **o),
    "shuffled by a generator": with_generator,
    "distributed": distributed,
    "elastic": elastic,
    "weighted": lambda **o: DataLoader(
        Augmented(N), BATCH, sampler=data.WeightedRandomSampler([1.0 + i for i in range(N)], N), **o
    ),
    "with replacement": lambda **o: DataLoader(
        Augmented(N), BATCH, sampler=data.RandomSampler(range(N), replacement=True), **o
    ),
    "a sampler with state": lambda **o: DataLoader(Augmented(N), BATCH, sampler=Counting(N), **o),
    "a sampler without state": lambda **o: DataLoader(Augmented(N), BATCH, sampler=Shuffling(N), **o),
    "a batch sampler": lambda **o: DataLoader(
        Augmented(N),
        batch_sampler=data.BatchSampler(data.RandomSampler(range(N)), BATCH, drop_last=False),
        **o,
    ),
    "single samples": lambda **o: DataLoader(Augmented(STEPS), None, shuffle=True, **o),
    "numpy's keys": lambda **o: DataLoader(
        Augmented(N), BATCH, sampler=np.random.RandomState(1).permutation(N), **o
    ),
}
Run = list[tuple[Any, float]]
"""For each batch what it is, and a number that the training drew."""


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def epochs_of(
    loader: DataLoader, numbers: Iterator[int] | range, at: int | None = None
) -> tuple[list[Run], Any]:
    """Runs epochs; stops in the first after `at` batches, with the loader's state as JSON."""
    runs: list[Run] = []
    for number in numbers:
        set_epoch(loader, number)
        run: Run = []
        runs.append(run)
        if at == 0:
            return runs, json.dumps(loader.state_dict())
        for step, batch in enumerate(loader, start=1):
            run.append((fingerprint(batch), torch.rand(()).item()))
            if at == step:
                return runs, json.dumps(loader.state_dict())
    return runs, json.dumps(loader.state_dict())


def set_epoch(loader: DataLoader, number: int) -> None:
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(number)


def whole(make: Callable[..., DataLoader], epochs: int, **options: Any) -> list[Run]:
    seed(5)
    return epochs_of(make(**options), range(epochs))[0]


def state_after(loader: Any, batches: int, pause_s: float = 0.0) -> Any:
    """The state of a loader that has given so many batches, as a checkpoint brings it."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
        time.sleep(pause_s)
    return json.loads(json.dumps(loader.state_dict()))


def stopped(
    make: Callable[..., DataLoader],
    epoch: int,
    step: int,
    epochs: int,
    options: dict[str, Any],
    after: dict[str, Any],
) -> list[Run]:
    """The same run, stopped in an epoch after `step` batches and gone on with by another loader, with other options."""
    seed(5)
    loader = make(**options)
    before, _ = epochs_of(loader, range(epoch)) if epoch else ([], None)
    first, state = epochs_of(loader, range(epoch, epoch + 1), step)
    generator = torch.get_rng_state()
    seed(77)
    again = make(**after)
    again.load_state_dict(json.loads(state))
    second: Run = []
    set_epoch(again, epoch)
    if make in SEVERAL_RANKS:
        torch.set_rng_state(generator)
    for batch in again:
        second.append((fingerprint(batch), torch.rand(()).item()))
    rest = epochs_of(again, range(epoch + 1, epochs))[0]
    return [*before, first[0] + second, *rest]
