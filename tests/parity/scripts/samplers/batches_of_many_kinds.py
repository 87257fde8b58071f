import numpy as np
import torch
from parity import show
from torch.utils.data import DataLoader

data = list(range(10, 20))
show(*DataLoader(data, batch_sampler=[(0, 1), (2,)], num_workers=2))
show(*DataLoader(data, batch_sampler=[np.array([3, 4]), np.array([5])], num_workers=2))
show(*DataLoader(data, batch_sampler=[torch.tensor([6, 7])], num_workers=1))
show(*DataLoader(data, batch_sampler=(range(i, i + 2) for i in (0, 4)), num_workers=2))
show(*DataLoader(torch.arange(5), batch_size=None, sampler=[[0, 1], [4, 2]], num_workers=2))
