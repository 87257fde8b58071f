import numpy as np
from parity import show
from torch.utils.data import DataLoader, Dataset

rows = np.zeros(6, dtype=[("id", "i4"), ("xy", "f8", (2,)), ("name", "U4")])
rows["id"] = range(6)
rows["name"] = list("abcdef")


class Rows(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return rows[i : i + 1]


for batch in DataLoader(Rows(), batch_size=3, num_workers=2, collate_fn=np.concatenate):
    show(batch)
