import decimal
from decimal import Decimal

from parity import show
from torch.utils.data import DataLoader, Dataset

decimal.getcontext().prec = 5


class Thirds(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return str(Decimal(i) / 3)


for batch in DataLoader(Thirds(), batch_size=2, num_workers=2):
    show(batch)
