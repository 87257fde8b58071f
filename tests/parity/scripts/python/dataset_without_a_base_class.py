from parity import show
from torch.utils.data import DataLoader


class Rows:
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"i": i}


class Values(list):
    def __getitem__(self, i):
        return 10 * super().__getitem__(i)


show(*DataLoader(Rows(3), batch_size=2, num_workers=2))
show(*DataLoader(Values([1, 2, 3]), batch_size=2, num_workers=2))
