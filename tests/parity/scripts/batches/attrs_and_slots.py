import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Point:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __repr__(self):
        return f"Point({self.x}, {self.y})"


class Points(Dataset):
    __slots__ = ("n",)

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return Point(i, -i)


def collate(points):
    return torch.tensor([[p.x, p.y] for p in points])


show(*DataLoader(Points(5), batch_size=2, num_workers=2, collate_fn=collate))
