from enum import Enum, Flag, IntEnum, auto

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Color(Enum):
    RED = 1
    CRIMSON = 1
    BLUE = 2


class Planet(Enum):
    MERCURY = (3.303e23, 2.4397e6)
    EARTH = (5.976e24, 6.37814e6)

    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius

    @property
    def gravity(self):
        return 6.6743e-11 * self.mass / self.radius**2


class Label(str, Enum):
    CAT = "cat", 3
    DOG = "dog", 4

    def __new__(cls, name, number):
        made = str.__new__(cls, name)
        made._value_ = name
        made.number = number
        return made


class Raw(bytes, Enum):
    ZERO = (0, "first")
    ONE = (1, "second")

    def __new__(cls, value, label):
        made = bytes.__new__(cls, [value])
        made._value_ = value
        made.label = label
        return made


class Access(Flag):
    READ = auto()
    WRITE = auto()
    BOTH = READ | WRITE


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Items(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        planet, label, raw = (list(kind)[i % 2] for kind in (Planet, Label, Raw))
        return (
            Color.CRIMSON.value + 10 * (Color["CRIMSON"] is Color.RED) + 100 * len(Color.__members__),
            planet.radius,
            planet.gravity,
            (label, label.number, raw[0], raw.label, Raw(i % 2) is raw),
            (Access.READ in Access.BOTH, Access["BOTH"] is Access.BOTH, len(Access)),
            Level(1 + i % 2) + 1,
            torch.tensor(i),
        )


for batch in DataLoader(Items(), batch_size=2, num_workers=2):
    show(batch)
