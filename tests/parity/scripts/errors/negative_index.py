from parity import show
from torch.utils.data import DataLoader

data = list(range(10, 20))
show(*DataLoader(data, batch_size=2, sampler=[-1, 0, -10, 3], num_workers=2))
try:
    show(*DataLoader(data, batch_size=1, sampler=[-11], num_workers=2))
except IndexError:
    print("IndexError")
