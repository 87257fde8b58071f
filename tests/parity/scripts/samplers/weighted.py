import torch
from parity import show
from torch.utils.data import DataLoader, WeightedRandomSampler

data = list(range(6))
sampler = WeightedRandomSampler([1, 1, 1, 5, 5, 5], 10, generator=torch.Generator().manual_seed(0))
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)
for epoch in range(2):
    show(*loader)
