import sqlite3

from parity import show
from torch.utils.data import DataLoader, Dataset

with sqlite3.connect("rows.db") as connection:
    connection.execute("create table rows (id integer primary key, name text, value real)")
    connection.executemany("insert into rows values (?, ?, ?)", [(i, f"n{i}", i / 4) for i in range(8)])
connection.close()


class Rows(Dataset):
    def __init__(self, path):
        self.path = path
        self.connection = None

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if self.connection is None:
            self.connection = sqlite3.connect(self.path)
        return self.connection.execute("select * from rows where id = ?", (i,)).fetchone()


show(*DataLoader(Rows("rows.db"), batch_size=3, num_workers=2))
