from parity import show
from torch.utils.data import DataLoader


class Recorded:
    def __init__(self, n):
        self.n, self.drawn = n, 0

    def __iter__(self):
        for i in range(self.n):
            self.drawn += 1
            yield i


for workers, factor in ((1, None), (2, None), (2, 3), (1, 5)):
    sampler = Recorded(100)
    iterator = iter(
        DataLoader(list(range(100)), sampler=sampler, num_workers=workers, prefetch_factor=factor)
    )
    ahead = [sampler.drawn]
    for _ in range(3):
        next(iterator)
        ahead.append(sampler.drawn)
    show(workers, factor, ahead)
