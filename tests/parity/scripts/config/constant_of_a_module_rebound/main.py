import constants
from data import Numbers
from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
for value in (3, 4):
    constants.FACTOR = value
    for batch in loader:
        show(batch)
