from parity import show
from torch.utils.data import DataLoader, Dataset, Sampler


class Multiscale(Sampler):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        for i in range(self.n):
            yield i, (32 if i % 2 else 64, 0.5), {"flip": i > 2}


class Images(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, key):
        index, (size, scale), options = key
        return index, size * scale, options["flip"]


show(*DataLoader(Images(), batch_size=2, sampler=Multiscale(4), num_workers=2))
