import torch
from torch.utils.data import Dataset

from .tensors import Image


class Pictures(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((3, 2, 4), i).as_subclass(Image)
