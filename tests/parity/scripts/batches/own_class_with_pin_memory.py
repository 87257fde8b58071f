import warnings

import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


class Batch:
    def __init__(self, samples):
        self.x, self.y = (torch.stack(column) for column in zip(*samples))
        self.pinned = False

    def pin_memory(self):
        self.pinned = True
        return self


data = TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
for pin in (False, True):
    for batch in DataLoader(data, batch_size=2, num_workers=2, collate_fn=Batch, pin_memory=pin):
        show(type(batch).__name__, batch.x, batch.y)
