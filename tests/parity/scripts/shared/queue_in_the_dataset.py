import torch.multiprocessing as mp
from parity import show
from torch.utils.data import DataLoader, Dataset


class Reports(Dataset):
    def __init__(self):
        self.reports = mp.SimpleQueue()

    def __len__(self):
        return 4

    def __getitem__(self, i):
        self.reports.put(i)
        return i


dataset = Reports()
show(*DataLoader(dataset, batch_size=2, num_workers=1))
show(sorted(dataset.reports.get() for _ in range(4)))
