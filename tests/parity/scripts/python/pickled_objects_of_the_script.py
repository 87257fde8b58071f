import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


@dataclass
class Sample:
    x: list
    y: int


root = Path("cache")
root.mkdir(exist_ok=True)
for i in range(6):
    (root / f"{i}.pkl").write_bytes(pickle.dumps(Sample([i, i + 1], i % 2)))


class Cached(Dataset):
    def __init__(self, root):
        self.files = sorted(root.glob("*.pkl"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        sample = pickle.loads(self.files[i].read_bytes())
        return torch.tensor(sample.x), sample.y


for batch in DataLoader(Cached(root), batch_size=3, num_workers=2):
    show(batch)
