import multiprocessing as mp

from parity import show
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __init__(self, cache):
        self.cache = cache

    def __len__(self):
        return 4

    def __getitem__(self, i):
        self.cache[i] = i * i
        return i


if __name__ == "__main__":
    with mp.Manager() as manager:
        dataset = Cached(manager.dict())
        show(*DataLoader(dataset, batch_size=2, num_workers=2))
        show(dict(sorted(dataset.cache.items())))
