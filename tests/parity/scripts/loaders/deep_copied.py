import copy

import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, num_workers=2)
other = copy.deepcopy(loader)
other.dataset.tensors[0].mul_(10)
show(*loader)
show(*other)
show(*copy.copy(loader))
