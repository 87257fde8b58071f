# parity: raises=AssertionError
import multiprocessing

from torch.utils.data import DataLoader, Dataset


class Pools(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        with multiprocessing.Pool(1) as pool:
            return pool.apply(abs, (-i,))


print("start")  # a worker of torch is a daemon, which may have no children
for batch in DataLoader(Pools(), num_workers=1):
    print(batch)
