import base
from parity import show
from torch.utils.data import DataLoader

original = base.Numbers.__getitem__


def doubled(self, i):
    return 2 * original(self, i)


base.Numbers.__getitem__ = doubled
base.Numbers.factor = 7
for batch in DataLoader(base.Numbers(), batch_size=4, num_workers=2):
    show(batch)
