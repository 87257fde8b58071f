from functools import partial

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    def __init__(self, lines):
        self.lines = lines

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        return self.lines[i]


def pad(samples, *, value, side="right"):
    longest = max(map(len, samples))
    padded = [
        s + [value] * (longest - len(s)) if side == "right" else [value] * (longest - len(s)) + s
        for s in samples
    ]
    return torch.tensor(padded), torch.tensor([len(s) for s in samples])


lines = Lines([[1], [2, 3], [4, 5, 6], []])
show(*DataLoader(lines, batch_size=2, num_workers=2, collate_fn=partial(pad, value=-1)))
show(*DataLoader(lines, batch_size=2, num_workers=2, collate_fn=partial(pad, value=0, side="left")))
