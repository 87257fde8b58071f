import random

import numpy as np
import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Draws(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        random.random(), np.random.rand(), torch.rand(1)
        return i


random.seed(1)
np.random.seed(2)
torch.manual_seed(3)
loader = DataLoader(Draws(), batch_size=2, shuffle=True, num_workers=2)
for epoch in range(2):
    show(*loader)
    show(random.random(), np.random.rand(), torch.rand(2))
