from functools import cached_property

from parity import show
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    def __init__(self, text):
        self.text = text

    @cached_property
    def lines(self):
        return self.text.split("|")

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        return self.lines[i]


show(*DataLoader(Lines("a|b|c"), batch_size=2, num_workers=2))
