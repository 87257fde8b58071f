import functools
from collections.abc import Callable
from typing import Generic, NewType, ParamSpec, TypedDict, TypeVar, TypeVarTuple

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

P = ParamSpec("P")
R = TypeVar("R")
Shape = TypeVarTuple("Shape")
ImageId = NewType("ImageId", int)


class Row(TypedDict):
    image_id: int
    x: torch.Tensor


class Grid(Generic[*Shape]):
    def size(self) -> int:
        return 2


def logged(fn: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(fn)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    return inner


class Rows(Dataset[Row]):
    def __len__(self) -> int:
        return 6

    @logged
    def __getitem__(self, i: ImageId) -> Row:
        return Row(image_id=ImageId(i * 2), x=torch.ones(Grid[int, str]().size()) * i)


for batch in DataLoader(Rows(), batch_size=3, num_workers=2):
    show(batch)
