import torch
from parity import show
from torch.utils.data import DataLoader

generator = torch.Generator().manual_seed(5)
loader = DataLoader(list(range(10)), batch_size=4, shuffle=True, num_workers=2, generator=generator)
for epoch in range(3):
    show(*loader)
show(torch.rand(2, generator=generator))
