from collections import namedtuple
from typing import NamedTuple

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

Pair = namedtuple("Pair", "image label")


class Sample(NamedTuple):
    pair: Pair
    name: str


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return Sample(Pair(torch.ones(2) * i, i), f"n{i}")


for batch in DataLoader(Samples(), batch_size=2, num_workers=2):
    show(batch, type(batch) is Sample, batch.pair.image.shape)
