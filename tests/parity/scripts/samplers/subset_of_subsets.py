import torch
from parity import show
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

a = TensorDataset(torch.arange(6), torch.arange(6) * 10)
b = TensorDataset(torch.arange(100, 104), torch.arange(4))
both = ConcatDataset([a, Subset(b, [3, 1])])
show(*DataLoader(both, batch_size=3, num_workers=2))
for part in random_split(both, [0.5, 0.5], generator=torch.Generator().manual_seed(0)):
    show(len(part), *DataLoader(part, batch_size=3, num_workers=2))
show(*DataLoader(a + b, batch_size=5, num_workers=1))
