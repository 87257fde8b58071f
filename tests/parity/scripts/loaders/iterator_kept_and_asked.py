from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(list(range(5)), batch_size=2, num_workers=2)
iterator = iter(loader)
for step in range(7):
    try:
        batch = next(iterator)
    except StopIteration:
        iterator = iter(loader)
        batch = next(iterator)
    show(step, batch)
