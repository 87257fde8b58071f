from typing import NamedTuple

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Sensor(NamedTuple):
    name: str
    channel: int


class Readings(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {
            ("lidar", 0): torch.tensor(i),
            Sensor("cam", 1): i,
            3: i,
            None: i,
            True: i,
            "x": i,
            2.5: i,
            b"k": i,
        }


for batch in DataLoader(Readings(), batch_size=2, num_workers=2):
    show(batch)
