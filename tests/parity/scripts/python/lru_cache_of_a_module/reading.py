from functools import lru_cache

from torch.utils.data import Dataset


@lru_cache
def read(name):
    return name * 2


class Files(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        return read(self.names[i])

    @lru_cache(maxsize=None)
    def size(self, i):
        return len(self[i])
