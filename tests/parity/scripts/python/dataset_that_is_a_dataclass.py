from dataclasses import dataclass, field
from typing import Callable, ClassVar

from parity import show
from torch.utils.data import DataLoader, Dataset


@dataclass
class Rows(Dataset):
    rows: list
    transform: Callable = str
    seen: dict = field(default_factory=dict)
    kinds: ClassVar[dict] = {"a": 1}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.transform(self.rows[i]) + str(self.kinds["a"])


show(*DataLoader(Rows([1, 2, 3]), batch_size=2, num_workers=2))
show(*DataLoader(Rows([1, 2, 3], transform=lambda x: "x" * x), batch_size=2, num_workers=2))
