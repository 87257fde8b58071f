import argparse
import torch
from torch.utils.data import DataLoader
from parity import show
import config


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--size", type=int, default=6)
    args = p.parse_args()
    config.merge(size=args.size)
    from transforms import crop, pad

    class D(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return pad(crop(torch.arange(10.0) + i))

    for b in DataLoader(D(), batch_size=2, num_workers=2):
        show(b)


if __name__ == "__main__":
    main()
