import random

import numpy as np
import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.rand(1).item(), random.random()


loader = DataLoader(Noise(), batch_size=4, num_workers=2)
epochs = [torch.cat([torch.stack(batch) for batch in loader], 1) for _ in range(3)]
for draws in epochs:
    show(draws.shape, len(set(draws.flatten().tolist())), bool((0 <= draws).all() and (draws < 1).all()))
show([bool((a == b).any()) for a, b in zip(epochs, epochs[1:])])
