import logging

from parity import show
from torch.utils.data import DataLoader, Dataset


class Logged(Dataset):
    def __init__(self):
        self.log = logging.getLogger("data.set")
        self.log.addHandler(logging.NullHandler())

    def __len__(self):
        return 2

    def __getitem__(self, i):
        self.log.info("sample %d", i)
        return self.log.name, len(self.log.handlers)


show(*DataLoader(Logged(), batch_size=2, num_workers=1))
