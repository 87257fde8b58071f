import random

from parity import show
from torch.utils.data import DataLoader, Dataset

random.seed(0)


class Buckets:
    """Batches of equal length, in another order each epoch."""

    def __init__(self, lengths, n):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[i : i + n] for i in range(0, len(order), n)]

    def __iter__(self):
        random.shuffle(self.batches)
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return i


lengths = [(5 * i) % 12 for i in range(12)]
for persistent in (False, True):
    loader = DataLoader(
        Numbers(), batch_sampler=Buckets(lengths, 3), num_workers=2, persistent_workers=persistent
    )
    for epoch in range(3):
        show([batch.tolist() for batch in loader])
show(random.random())
