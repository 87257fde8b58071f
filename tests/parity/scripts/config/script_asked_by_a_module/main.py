import argparse

import opts
import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

OPT = argparse.Namespace(size=3)


class Ones(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.ones(opts.get().size) * i


for batch in DataLoader(Ones(), batch_size=2, num_workers=2):
    show(batch)
