import first
import second
from parity import show
from torch.utils.data import DataLoader

second.table["extra"] = 10
first.items.append(second.table)
for batch in DataLoader(first.Shared(), batch_size=2, num_workers=2):
    show(batch)
