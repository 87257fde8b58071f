from parity import show
from torch.utils.data import DataLoader, Dataset


class Table(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, key):
        return key, self.rows[key]


rows = {"a": 1, "b": 2, "ü": 3}
show(*DataLoader(Table(rows), batch_size=2, sampler=list(rows), num_workers=2))
show(*DataLoader(rows, batch_size=2, sampler=sorted(rows, reverse=True), num_workers=1))
