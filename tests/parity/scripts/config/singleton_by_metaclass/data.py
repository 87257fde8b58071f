import torch
from singleton import Config
from torch.utils.data import Dataset


class Sized(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((Config().size,), i)
