import torch
from parity import show
from torch.utils.data import DataLoader, StackDataset, TensorDataset

images = TensorDataset(torch.arange(8.0).view(4, 2))
show(*DataLoader(StackDataset(images, [0, 1, 2, 3]), batch_size=2, num_workers=2))
show(*DataLoader(StackDataset(image=images, label=list("abcd")), batch_size=2, num_workers=2))
