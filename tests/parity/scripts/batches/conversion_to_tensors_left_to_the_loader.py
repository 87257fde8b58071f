import array
from collections import deque

import numpy as np
from parity import show
from torch.utils.data import DataLoader, Dataset


class Plain(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.arange(3, dtype=np.float32) + i, i, "s", [1, 2], {"k": np.int64(i)}


show(*DataLoader(Plain(), batch_size=None, num_workers=2))
show(*DataLoader(Plain(), batch_size=None, num_workers=0))
show(*DataLoader(np.arange(12).reshape(4, 3), batch_size=2, num_workers=2))
show(*DataLoader(range(5), batch_size=2, num_workers=2))
show(*DataLoader("hello", batch_size=2, num_workers=2))
