import numpy as np
import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Audio(np.ndarray):
    """As in numpy's guide to subclassing."""

    def __new__(cls, data, rate=None):
        made = np.asarray(data).view(cls)
        made.rate = rate
        return made

    def __array_finalize__(self, other):
        if other is not None:
            self.rate = getattr(other, "rate", None)


class Clips(Dataset):
    def __init__(self):
        self.clips = [Audio(np.arange(4.0) + i, rate=8000 * (1 + i % 2)) for i in range(6)]

    def __len__(self):
        return 6

    def __getitem__(self, i):
        clip = self.clips[i]
        return torch.tensor(np.asarray(clip)), (clip.rate or 16000)


for batch in DataLoader(Clips(), batch_size=3, num_workers=2):
    show(batch)
