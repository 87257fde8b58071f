import torch
from parity import show
from torch.utils.data import DataLoader, SequentialSampler, SubsetRandomSampler

data = list(range(100, 120))
sampler = SubsetRandomSampler(range(0, 20, 3), generator=torch.Generator().manual_seed(2))
loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=2, drop_last=True)
show(len(loader), *loader, *loader)
show(*DataLoader(data, batch_size=9, sampler=SequentialSampler(data), num_workers=1))
