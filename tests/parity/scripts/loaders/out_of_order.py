from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(list(range(20)), batch_size=4, num_workers=2, in_order=False)
for epoch in range(2):
    show(sorted(batch.tolist() for batch in loader))
