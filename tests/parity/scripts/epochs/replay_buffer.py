import numpy as np
from parity import show
from torch.utils.data import DataLoader, Dataset


class Replay(Dataset):
    def __init__(self, capacity):
        self.states = np.zeros((capacity, 4), np.float32)
        self.size = 0

    def add(self, state):
        self.states[self.size] = state
        self.size += 1

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return self.states[i]


buffer = Replay(100)
for episode in range(3):
    for step in range(5):
        buffer.add(np.arange(4) + 10 * episode + step)
    show(*DataLoader(buffer, batch_size=8, num_workers=2))
