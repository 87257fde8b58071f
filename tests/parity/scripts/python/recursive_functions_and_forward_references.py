from __future__ import annotations

from parity import show
from torch.utils.data import DataLoader, Dataset


class Tree(Dataset):
    def __init__(self, depth: int) -> None:
        self.left: Tree | None = Tree(depth - 1) if depth else None

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> int:
        return fibonacci(i) + (self.left[i] if self.left else 0)


def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + later(n)


def later(n):
    return fibonacci(n - 2)


show(*DataLoader(Tree(3), batch_size=3, num_workers=2))
