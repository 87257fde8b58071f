# parity: raises=FloatingPointError
import torch
from torch.utils.data import DataLoader, TensorDataset

for step, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(8)), batch_size=2, num_workers=2)):
    print(step, x)
    if step == 2:
        raise FloatingPointError("loss is nan")
