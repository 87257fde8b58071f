from functools import singledispatch, singledispatchmethod

from parity import show
from torch.utils.data import DataLoader, Dataset


@singledispatch
def encode(value):
    return -1


@encode.register
def _(value: str):
    return len(value)


@encode.register(list)
def _(value):
    return sum(map(encode, value))


class Values(Dataset):
    values = ["abc", ["a", "bb"], 7]

    def __len__(self):
        return 3

    @singledispatchmethod
    def name(self, value):
        return "other"

    @name.register
    def _(self, value: str):
        return "text"

    def __getitem__(self, i):
        return encode(self.values[i]), self.name(self.values[i])


show(*DataLoader(Values(), batch_size=3, num_workers=2))
