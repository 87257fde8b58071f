from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import get_type_hints

from parity import show
from torch.utils.data import DataLoader, Dataset


@dataclass
class Record:
    file: Path
    price: Decimal
    n: int


def from_row(cls, row):
    return cls(
        **{name: made(value) for (name, made), value in zip(get_type_hints(cls).items(), row, strict=True)}
    )


class Rows(Dataset):
    rows = [(f"a/{i}.png", f"{i}.5", str(i)) for i in range(6)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        record = from_row(Record, self.rows[i])
        return record.file.stem, float(record.price), record.n


for batch in DataLoader(Rows(), batch_size=3, num_workers=2):
    show(batch)
