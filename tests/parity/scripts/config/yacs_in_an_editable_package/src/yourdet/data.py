import torch
from torch.utils.data import Dataset

from yourdet.config import cfg

DATASETS = {}


def register(name):
    def add(kind):
        DATASETS[name] = kind
        return kind

    return add


@register("squares")
class Squares(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.zeros(3, cfg.INPUT.SIZE, 2), cfg.INPUT.FLIP


def build_dataset(name, n):
    return DATASETS[name](n)
