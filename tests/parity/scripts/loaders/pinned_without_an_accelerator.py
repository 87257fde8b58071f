import warnings

import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=3, num_workers=2, pin_memory=True)
for epoch in range(2):
    for (x,) in loader:
        show(x, x.is_pinned(), x.to("cpu", non_blocking=True).sum())
