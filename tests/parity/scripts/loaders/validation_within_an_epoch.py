import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset

train = TensorDataset(torch.arange(12.0))
val = TensorDataset(torch.arange(100.0, 104.0))
train_loader = DataLoader(train, batch_size=2, num_workers=2)
val_loader = DataLoader(val, batch_size=2, num_workers=1)
for epoch in range(2):
    for step, (x,) in enumerate(train_loader):
        show(step, x)
        if step % 3 == 2:
            show("val", sum(v.sum() for (v,) in val_loader))
