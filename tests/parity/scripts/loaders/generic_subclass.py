import torch
from parity import show
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((2,), i)


class RowLoader(DataLoader[Tensor]):
    def first(self) -> Tensor:
        return next(iter(self))


def total(loader: DataLoader[Tensor]) -> int:
    return int(sum(batch.sum() for batch in loader))


loader: DataLoader[Tensor] = RowLoader(Rows(), batch_size=2, num_workers=2)
show(loader.first(), total(loader), total(DataLoader[Tensor](Rows(), num_workers=1)))
