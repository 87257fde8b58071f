import multiprocessing as mp

from parity import show
from torch.utils.data import DataLoader, Dataset


class Counted(Dataset):
    def __init__(self):
        self.calls = mp.Value("i", 0)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        with self.calls.get_lock():
            self.calls.value += 1
        return i


dataset = Counted()
show(*DataLoader(dataset, batch_size=2, num_workers=2))
show(dataset.calls.value)
