import argparse

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--size", type=int, default=4)
args = parser.parse_args()
args.offset = 100


class Numbers(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((args.size,), i * args.lr + args.offset)


for batch in DataLoader(Numbers(), batch_size=3, num_workers=1):
    show(batch)
