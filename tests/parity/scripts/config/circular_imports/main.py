import data
from parity import show
from torch.utils.data import DataLoader

data.SCALE = 2
for batch in DataLoader(data.Items(), batch_size=3, num_workers=2):
    show(batch)
