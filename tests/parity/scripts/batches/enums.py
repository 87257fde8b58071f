from enum import Enum, Flag, IntEnum, StrEnum

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Split(Enum):
    TRAIN = "train"
    TEST = "test"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Name(StrEnum):
    A = "a"


class Access(Flag):
    READ = 1
    WRITE = 2


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return list(Split)[i % 2], Level.HIGH, Name.A, Access.READ | Access.WRITE, {Split.TRAIN: i}


for batch in DataLoader(Samples(), batch_size=2, num_workers=2, collate_fn=list):
    show(batch, batch[0][0] is Split.TRAIN)
