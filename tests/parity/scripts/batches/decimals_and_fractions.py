from decimal import Decimal
from fractions import Fraction

from parity import show
from torch.utils.data import DataLoader, Dataset


class Prices(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {"price": Decimal(i) / 8, "share": Fraction(i, 7)}


for batch in DataLoader(Prices(), batch_size=2, num_workers=2, collate_fn=list):
    show(batch)
