from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(list(range(100)), batch_size=10, num_workers=2)
for _ in range(8):
    show(next(iter(loader)))
