import numpy as np
from parity import show
from torch.utils.data import DataLoader, Dataset

np.save("rows.npy", np.arange(40.0).reshape(8, 5))


class Rows(Dataset):
    def __init__(self, changed):
        self.rows = np.load("rows.npy", mmap_mode="c")
        if changed:
            self.rows[3] = 0
            self.rows -= self.rows.mean(0)

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return np.array(self.rows[i])


for changed in (False, True):
    show(*DataLoader(Rows(changed), batch_size=4, num_workers=2))
