import functools
from torch.utils.data import DataLoader
from parity import show
import loading
from data import D


def doubled(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        return fn(*args, **kwargs) * 2

    return inner


loading.load = doubled(loading.load)
for b in DataLoader(D(), batch_size=3, num_workers=2):
    show(*b)
loading.Reader.read = doubled(loading.Reader.read)
for b in DataLoader(D(), batch_size=3, num_workers=2):
    show(*b)
