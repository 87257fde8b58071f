import math

from parity import show
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    values = [0, -1, 2**62, 2**200, -(2**70), math.inf, math.nan, -0.0, 1e-320, True, None, 1 + 2j, 0.1]

    def __len__(self):
        return len(self.values)

    def __getitem__(self, i):
        return self.values[i]


show(*DataLoader(Numbers(), batch_size=5, num_workers=2, collate_fn=list))
