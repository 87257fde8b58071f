"""Datasets for tests of whole loaders, and fingerprints of batches. Feeders import this module, too."""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler


class Numbers(Dataset):
    """Sample i: its index and `width` floats that no other sample has."""

    def __init__(self, n: int = 103, width: int = 7, seconds: float = 0.0) -> None:
        self.n, self.width, self.seconds = n, width, seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        if not -self.n <= i < self.n:
            raise IndexError(f"index {i} of a dataset of {self.n}")
        if self.seconds:
            time.sleep(self.seconds)
        return i, torch.arange(self.width, dtype=torch.float32) * 0.5 + i


class Augmented(Numbers):
    """Draws from all three generators."""

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor, np.ndarray, float]:
        return i, torch.randn(self.width), np.random.rand(3), random.random()


class InBatches(Augmented):
    """Makes its samples batch by batch."""

    def __getitems__(self, keys: list[int]) -> list[Any]:
        noise = torch.randn(len(keys), 2)
        return [(i, noise[at]) for at, i in enumerate(keys)]


def noisy_collate(samples: list[Any]) -> Any:
    """A collate_fn that draws, too."""
    ids = torch.tensor([s[0] for s in samples])
    return {"ids": ids, "mixed": torch.rand(len(samples)) + np.random.rand(), "shift": random.random()}


class Box(NamedTuple):
    corner: torch.Tensor
    label: str


class Record(Mapping):
    """A Mapping that is no dict; default_collate rebuilds it from one."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@dataclasses.dataclass
class Page:
    text: str
    tokens: torch.Tensor


DTYPES = [
    getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32",
        "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
    if hasattr(torch, name)
]  # fmt: skip


def tensor_of(dtype: torch.dtype, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bit pattern there is, NaNs and all; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    nbytes = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * nbytes), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


class Zoo(Numbers):
    """Every kind of leaf and container; lists of samples stay lists with `as_list`."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "id": i,
            "dtypes": {str(d): tensor_of(d, i, (2, 3)) for d in DTYPES},
            "empty": {str(d): torch.empty(0, 3, dtype=d) for d in DTYPES},
            "record": Record({"a": torch.tensor(i), "b": f"sample {i}"}),
            "ordered": collections.OrderedDict(z=torch.tensor([i]), a=i / 3),
            "box": Box(torch.tensor([i, i + 1]), f"näme-{i}"),
            "array": np.full((2, 2), i, dtype=">i2"),
            "scalar": np.float32(i) / 7,
            "dates": np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
            "words": ["a" * (i % 5), "漢字", ""],
            "bytes": bytes([i % 256]) * (i % 3),
            "none": None,
            "big": 2**70 + i,
            "nothing": (),
            "page": Page(f"page {i}", torch.arange(i % 4)),
            "ragged": torch.arange(i % 6),
            "channels_last": torch.arange(24.0)
            .reshape(1, 2, 3, 4)
            .add(i)
            .to(memory_format=torch.channels_last),
            "scalar_tensor": torch.tensor(float(i)),
        }


def as_list(samples: list[Any]) -> list[Any]:
    return samples


class Keyed(Numbers):
    """Takes keys of any kind: gives them back, and what they are."""

    def __getitem__(self, key: Any) -> Any:
        return {"key": key, "kind": type(key).__name__}


class Plain(Numbers):
    """What torch's default_collate takes: tensors of its dtypes, dicts, Mappings, named tuples, strings."""

    def __getitem__(self, i: int) -> Any:
        return {
            "tensors": [tensor_of(d, i, (2, 3)) for d in DTYPES],
            "empty": [torch.empty(0, 3, dtype=d) for d in DTYPES],
            "record": Record({"a": torch.tensor(i), "b": f"sample {i}"}),
            "box": Box(torch.tensor([i, i + 1]), f"name-{i}"),
            "array": np.full((2, 2), i, dtype=np.int16),
            "number": i,
            "float": i / 3,
            "text": f"text {i}",
            "pair": (i, torch.tensor([i])),
        }


class Sized(Numbers):
    """Sample i is `nbytes` bytes of value i."""

    def __init__(self, nbytes: int, n: int = 64, seconds: float = 0.0) -> None:
        super().__init__(n, seconds=seconds)
        self.nbytes = nbytes

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((self.nbytes,), i % 251, dtype=torch.uint8)


class Gated(Numbers):
    """Sample `at` waits until a file is there; not for ever, other tests need the feeders."""

    def __init__(self, gate: Path, at: int, n: int = 40) -> None:
        super().__init__(n)
        self.gate, self.at = gate, at

    def __getitem__(self, i: int) -> tuple[int, torch.Tensor]:
        ends = time.monotonic() + 20
        while i == self.at and not self.gate.exists() and time.monotonic() < ends:
            time.sleep(0.01)
        return super().__getitem__(i)


class Whose(Numbers):
    """Sample i: the process that makes it, slowly."""

    def __getitem__(self, i: int) -> tuple[int, int]:
        time.sleep(0.005)
        return os.getpid(), i


class Feedback(Sampler):
    """Gives next what the trainer found hardest so far: its order depends on when it is asked."""

    def __init__(self, n: int, steps: int) -> None:
        self.weights = [float(i) for i in range(n)]
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.steps):
            i = max(range(len(self.weights)), key=self.weights.__getitem__)
            self.weights[i] -= 50
            yield i

    def told(self, ids: Iterable[int], step: int) -> None:
        for i in ids:
            self.weights[i] += (i * 31 + step * 17) % 23


def fingerprint(item: Any) -> Any:
    """Types, dtypes, shapes, strides of dense tensors and all bytes, as one comparable value."""
    name = f"{type(item).__module__}.{type(item).__qualname__}"
    if isinstance(item, torch.Tensor):
        raw = (
            item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if item.numel()
            else b""
        )
        return name, str(item.dtype), tuple(item.shape), item.requires_grad, raw
    if isinstance(item, np.ndarray | np.generic):
        return name, str(item.dtype), item.shape, np.ascontiguousarray(item).tobytes()
    if isinstance(item, Mapping):
        return name, [(fingerprint(k), fingerprint(item[k])) for k in item]
    if isinstance(item, list | tuple):
        return name, [fingerprint(x) for x in item]
    if dataclasses.is_dataclass(item):
        return name, [(f.name, fingerprint(getattr(item, f.name))) for f in dataclasses.fields(item)]
    return name, repr(item)


def epoch(loader: Iterable[Any]) -> list[Any]:
    """Fingerprints of all batches, in order."""
    return [fingerprint(batch) for batch in loader]


def ids(loader: Iterable[Any]) -> list[int]:
    """The first element of each batch, an index or a tensor of them, put in a row."""
    found: list[int] = []
    for batch in loader:
        found += torch.as_tensor(batch[0]).reshape(-1).tolist()
    return found
