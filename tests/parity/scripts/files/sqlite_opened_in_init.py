import sqlite3

from parity import show
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self):
        self.connection = sqlite3.connect(":memory:")
        self.connection.executescript("create table rows (v); insert into rows values (1), (2), (3), (4);")

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.connection.execute("select v from rows limit 1 offset ?", (i,)).fetchone()[0]


print("start")
show(*DataLoader(Rows(), batch_size=2, num_workers=1))
