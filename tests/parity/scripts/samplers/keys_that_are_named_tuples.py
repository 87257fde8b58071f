from typing import NamedTuple

from parity import show
from torch.utils.data import DataLoader, Dataset


class Key(NamedTuple):
    video: int
    frame: int


class Frames(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, key):
        return key.video * 100 + key.frame, isinstance(key, Key)


keys = [Key(v, f) for v in range(2) for f in range(2)]
show(*DataLoader(Frames(), batch_size=2, sampler=keys, num_workers=2))
