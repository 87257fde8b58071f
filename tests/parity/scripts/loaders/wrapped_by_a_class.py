from itertools import chain, cycle, islice

from parity import show
from torch.utils.data import DataLoader


class Repeat:
    def __init__(self, loader, times):
        self.loader, self.times = loader, times

    def __len__(self):
        return len(self.loader) * self.times

    def __iter__(self):
        return chain.from_iterable(self.loader for _ in range(self.times))


loader = DataLoader(list(range(4)), batch_size=3, num_workers=1)
show(len(Repeat(loader, 3)), *Repeat(loader, 3))
show(*islice(cycle(loader), 5))
show(*zip(loader, DataLoader(list(range(9)), batch_size=3, num_workers=1)))
