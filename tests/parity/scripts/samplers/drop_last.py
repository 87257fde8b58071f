from parity import show
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

data = list(range(7))
for drop in (False, True):
    loader = DataLoader(data, batch_size=3, drop_last=drop, num_workers=2)
    show(len(loader), *loader)
    loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 5, drop), num_workers=2)
    show(len(loader), loader.batch_size, loader.drop_last, *loader)
show(*DataLoader([1, 2], batch_size=4, drop_last=True, num_workers=2), "nothing")
