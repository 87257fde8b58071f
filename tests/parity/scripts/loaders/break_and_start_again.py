import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, num_workers=2)
for stop in (0, 1, 5, 2):
    for step, batch in enumerate(loader):
        if step == stop:
            show(step, batch)
            break
show(len(list(loader)))
