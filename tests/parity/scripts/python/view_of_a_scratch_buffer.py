import numpy as np
import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Padded(Dataset):
    """Copies each image into the middle of a buffer that is made once."""

    def __init__(self, images):
        self.images = images
        self.buffer = np.zeros((6, 6), np.float32)
        self.inner = self.buffer[1:-1, 1:-1]
        self.rows = list(self.buffer)
        self.fixed = self.buffer[0]
        self.fixed.flags.writeable = False

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        self.inner[...] = self.images[i]
        return torch.from_numpy(self.buffer.copy()), float(self.rows[2].sum()), self.fixed.flags.writeable


images = np.arange(6 * 16, dtype=np.float32).reshape(6, 4, 4)
show(*DataLoader(Padded(images), batch_size=3, num_workers=2))
