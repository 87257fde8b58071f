import random

from parity import show
from torch.utils.data import DataLoader, Sampler


class ByLength(Sampler):
    def __init__(self, lengths, batch_size, seed=0):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batch_size, self.seed, self.epoch = batch_size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return (len(self.order) + self.batch_size - 1) // self.batch_size

    def __iter__(self):
        batches = [self.order[i : i + self.batch_size] for i in range(0, len(self.order), self.batch_size)]
        random.Random(self.seed + self.epoch).shuffle(batches)
        return iter(batches)


texts = ["a" * n for n in (3, 1, 4, 1, 5, 9, 2)]
loader = DataLoader(texts, batch_sampler=ByLength([len(t) for t in texts], 3), num_workers=2)
for epoch in range(3):
    loader.batch_sampler.set_epoch(epoch)
    show(len(loader), *loader)
