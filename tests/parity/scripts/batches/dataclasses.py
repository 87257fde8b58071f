from dataclasses import dataclass, field

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


@dataclass
class Sample:
    x: torch.Tensor
    label: int
    tags: list[str] = field(default_factory=list)


@dataclass
class Batch:
    x: torch.Tensor
    labels: torch.Tensor
    tags: list[list[str]]


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return Sample(torch.full((2,), i), i % 2, ["t"] * i)


def collate(samples):
    labels = torch.tensor([s.label for s in samples])
    return Batch(torch.stack([s.x for s in samples]), labels, [s.tags for s in samples])


for batch in DataLoader(Samples(), batch_size=2, num_workers=2, collate_fn=collate):
    show(batch, isinstance(batch, Batch))
