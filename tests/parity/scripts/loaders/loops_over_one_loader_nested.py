import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1)
for (a,) in loader:
    for (b,) in loader:
        print(a.tolist(), b.tolist())
