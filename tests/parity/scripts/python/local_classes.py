from dataclasses import dataclass
from enum import Enum

from parity import show
from torch.utils.data import DataLoader, Dataset


def build(n):
    class Mode(Enum):
        ON = 1
        OFF = 0

    @dataclass
    class Row:
        i: int
        mode: Mode

    class Rows(Dataset):
        def __len__(self):
            return n

        def __getitem__(self, i):
            row = Row(i, Mode(i % 2))
            return row.i, row.mode.name, row.mode is Mode.ON, super().__class__ is not None

    return Rows()


show(*DataLoader(build(5), batch_size=3, num_workers=2))
