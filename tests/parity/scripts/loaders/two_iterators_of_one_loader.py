import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, num_workers=2)
first, second = iter(loader), iter(loader)
show(next(first), next(second), next(first))
show(next(second), next(second), next(first))
for iterator in (first, second):
    try:
        next(iterator)
    except StopIteration:
        print("over")
