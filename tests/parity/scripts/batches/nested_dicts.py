import numpy as np
import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {
            "image": {"rgb": torch.full((3, 2, 2), i), "depth": np.full((2, 2), i, np.float32)},
            "boxes": [torch.zeros(4), (i, float(i))],
            "meta": {"name": f"img{i}", 7: i, "flag": i > 1, "raw": b"\x00%d" % i},
        }


for batch in DataLoader(Samples(), batch_size=3, num_workers=2):
    show(batch)
