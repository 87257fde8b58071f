import torch.multiprocessing as mp
from parity import show
from torch.utils.data import DataLoader, Dataset


class Limited(Dataset):
    def __init__(self):
        self.slots = mp.Semaphore(1)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        with self.slots:
            return i


print("start")
show(*DataLoader(Limited(), batch_size=2, num_workers=2))
