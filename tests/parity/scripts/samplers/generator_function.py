from parity import show
from torch.utils.data import DataLoader


class Alternating:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for i in range(self.n // 2):
            yield i
            yield self.n - 1 - i


show(*DataLoader(list(range(10)), batch_size=4, sampler=Alternating(10), num_workers=2))
show(*DataLoader(list(range(10)), batch_size=4, sampler=(i * 3 for i in range(3)), num_workers=2))
