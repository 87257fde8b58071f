from collections import UserDict

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Encoding(UserDict):
    def to(self, device):
        return Encoding({k: v.to(device) for k, v in self.items()})


class Texts(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return {"ids": [i] * (i + 1)}


def pad(samples):
    longest = max(len(s["ids"]) for s in samples)
    ids = torch.tensor([s["ids"] + [0] * (longest - len(s["ids"])) for s in samples])
    return Encoding({"ids": ids, "mask": (ids != 0).long()})


for batch in DataLoader(Texts(), batch_size=2, num_workers=2, collate_fn=pad):
    show(batch, type(batch).__name__, batch.to("cpu")["ids"])
