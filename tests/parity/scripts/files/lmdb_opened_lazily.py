# parity: needs=lmdb
import lmdb
from parity import show
from torch.utils.data import DataLoader, Dataset

with lmdb.open("db") as env, env.begin(write=True) as txn:
    for i in range(6):
        txn.put(str(i).encode(), b"v" * i)
env.close()


class Values(Dataset):
    env = None

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if self.env is None:
            self.env = lmdb.open("db", readonly=True, lock=False)
        with self.env.begin() as txn:
            return txn.get(str(i).encode())


show(*DataLoader(Values(), batch_size=3, num_workers=2))
