import numpy as np
from parity import show
from torch.utils.data import DataLoader, Dataset


class Arrays(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return {
            "float": np.full((2, 3), i, "<f4"),
            "time": np.array(["2024-01-01", "2025-06-0%d" % (i + 1)], "M8[D]"),
            "text": np.array(["a", "bcd"]),
            "bytes": np.array([b"a", b"bc"]),
            "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
            "empty": np.zeros((0, 4)),
            "scalar": np.float16(i),
        }


for batch in DataLoader(Arrays(), batch_size=2, num_workers=2, collate_fn=list):
    show(batch)
