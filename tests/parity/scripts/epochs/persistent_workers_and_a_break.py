from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(list(range(20)), batch_size=3, num_workers=2, persistent_workers=True)
for epoch in range(3):
    for step, batch in enumerate(loader):
        show(batch)
        if step == epoch:
            break
show(*loader)
