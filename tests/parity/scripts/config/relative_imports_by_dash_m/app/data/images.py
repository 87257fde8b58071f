import torch
from torch.utils.data import Dataset

from .. import settings
from ..geometry import rotate


class Images(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return rotate(torch.arange(settings.SIZE * 2).view(settings.SIZE, 2) + i)
