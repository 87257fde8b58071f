import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset

x = torch.zeros(4, 2)
loader = DataLoader(TensorDataset(x), batch_size=2, num_workers=2)
for epoch in range(3):
    show(*loader)
    x += 1
    x[epoch] = -1
