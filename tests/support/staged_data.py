"""IterableDatasets whose samples are worked on by a stage, and what torch's own loader makes of the two."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from stream_data import Shards
from torch.utils.data import IterableDataset, get_worker_info


class Both(IterableDataset):
    """The dataset with the stage in it, for torch's workers."""

    def __init__(self, dataset: IterableDataset, stage: Callable[[Any], Any]) -> None:
        self.dataset, self.stage = dataset, stage

    def __iter__(self) -> Iterator[Any]:
        return map(self.stage, self.dataset)


def bright(sample: dict[str, Any]) -> dict[str, Any]:
    """Changes the sample in place, as a dataset's code may."""
    sample["x"] *= 2
    sample["sum"] = sample["x"].sum()
    return sample


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "noise": torch.rand(4) + float(np.random.rand())}


def picky(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["id"] == 3007:
        raise ValueError("sample 3007 is damaged")
    return sample


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.01)
    return {"id": sample["id"], "pid": os.getpid()}


@dataclass
class Photo:
    """What travels from slot to stage by its class's name, with what only a pickle can carry."""

    number: int
    pixels: np.ndarray
    opened: Any


class Photos(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Photo]:
        for number in range(self.count):
            yield Photo(number, np.full((3, number % 5 + 1), number, np.uint8), slice(number, 9))


def developed(photo: Photo) -> torch.Tensor:
    photo.pixels += 1
    return torch.tensor([photo.number, int(photo.pixels.sum()), photo.opened.start])


class Heavy(IterableDataset):
    """Samples of so many bytes each."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[np.ndarray]:
        for number, size in enumerate(self.sizes):
            yield np.full(size, number, np.uint8)


def summed(sample: np.ndarray) -> torch.Tensor:
    return torch.tensor([len(sample), int(sample[0])])


def doubled(sample: np.ndarray) -> np.ndarray:
    time.sleep(0.05)
    return sample * 2


def worker(_: Any) -> torch.Tensor:
    info = get_worker_info()
    return torch.tensor([info.id, info.num_workers])


class Slowly(Shards):
    """A reader that takes its time."""

    def __init__(self, pause_s: float = 0.004) -> None:
        super().__init__(pause_s=pause_s)


class Odd(torch.utils.data.Dataset):
    """Map-style: draws at random, and is odd in one way or another."""

    def __init__(self, count: int, kind: str = "", log: str = "") -> None:
        self.count, self.kind, self.log = count, kind, log

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        if self.log:
            with open(self.log, "a") as file:
                file.write(".")
        if self.kind.startswith("fails") and i % 25 == 7:
            raise ValueError(f"sample {i} is damaged")
        if self.kind in ("deadly", "fails and dies") and i == 25:
            os._exit(3)
        size = 3 if self.kind == "ragged" and i % 25 == 7 else 2
        value = float(i) if self.kind == "mixed" and i % 25 == 7 else i
        sample = {"id": i, "x": torch.rand(size), "name": f"sample {i}", "value": value}
        return OrderedDict(sample) if self.kind == "ordered" else sample


class Counted(Odd):
    def __getitem__(self, i: int) -> Any:
        time.sleep(0.005)
        return {"id": i, "pid": os.getpid()}
