from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


@runtime_checkable
class Reads(Protocol):
    def read(self, i: int) -> int: ...


class Base(Dataset[T], ABC, Generic[T]):
    def __len__(self) -> int:
        return 4

    @abstractmethod
    def read(self, i: int) -> int: ...

    def __getitem__(self, i: int):
        return self.read(i), isinstance(self, Reads)


class Odd(Base[int]):
    def read(self, i: int) -> int:
        return 2 * i + 1


class Both(Odd):
    def read(self, i: int) -> int:
        return -super().read(i)


show(*DataLoader(Odd(), batch_size=2, num_workers=2))
show(*DataLoader(Both(), batch_size=2, num_workers=2))
