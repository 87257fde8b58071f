import sys

from parity import show
from torch.utils.data import DataLoader, Dataset

sys.setrecursionlimit(5000)


def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)


class Deep(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return depth(3000 + i)


for batch in DataLoader(Deep(), batch_size=2, num_workers=1):
    show(batch)
