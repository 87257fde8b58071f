from parity import show
from torch.utils.data import DataLoader, Dataset


class Flaky(Dataset):
    def __len__(self):
        return 6

    def load(self, i):
        if i % 3 == 0:
            raise OSError(i)
        return i

    def __getitem__(self, i):
        try:
            return self.load(i)
        except OSError:
            return self[(i + 1) % len(self)]


show(*DataLoader(Flaky(), batch_size=3, num_workers=2))
