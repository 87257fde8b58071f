"""A script whose two loaders are consumed for two epochs: what it records, tests compare and make again."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from dataloaderjob import DataLoader


class Pictures(Dataset):
    """Sample i: a picture with noise, and its number. `wrong`: an index whose picture differs in one element."""

    def __init__(self, n: int, *, wrong: int = -1, failing: int = -1) -> None:
        self.n, self.wrong, self.failing = n, wrong, failing

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i == self.failing:
            raise LookupError(f"no picture {i}")
        image = torch.randn(2, 3) + i
        if i == self.wrong:
            image[1, 2] = 100.0
        return {"image": image, "label": f"picture {i}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int)
    parser.add_argument("--wrong", type=int, default=-1)
    parser.add_argument("--failing", type=int, default=-1)
    parser.add_argument("--swap", type=int, help="give this place of the second epoch another key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--state", type=Path, help="go on from what is in this file, and write to it at the end"
    )
    parser.add_argument(
        "--kill-at", type=int, help="be killed after so many batches, right after writing the state"
    )
    args = parser.parse_args()
    dataset = Pictures(22, wrong=args.wrong, failing=args.failing)
    order = list(range(22))
    train = DataLoader(dataset, batch_size=4, sampler=order, num_workers=args.workers)
    test = DataLoader(Pictures(6), batch_size=3, num_workers=args.workers)
    loaders = (train, test)
    count = first = over = 0
    if args.state and args.state.exists():
        (first, over), *states = json.loads(args.state.read_text())
        for loader, state in zip(loaders, states, strict=True):
            loader.load_state_dict(state)

    def save(epoch: int, over: int) -> None:
        """`over`: how many loaders are through with this epoch."""
        if args.state:
            args.state.write_text(json.dumps([(epoch, over), *(loader.state_dict() for loader in loaders)]))

    for epoch in range(first, args.epochs):
        if epoch == 1 and args.swap is not None:
            order[args.swap] = 21
        for number, loader in enumerate(loaders):
            if epoch == first and number < over:
                continue
            torch.manual_seed(args.seed * 1000 + epoch * 10 + number)
            batches = iter(loader)
            while True:
                try:
                    if next(batches, None) is None:
                        break
                except LookupError:
                    continue
                count += 1
                if count == args.kill_at:
                    save(epoch, number)
                    os.kill(os.getpid(), signal.SIGKILL)
    save(args.epochs, 0)
    sys.stdout.write(f"{train.digest} {test.digest}\n")


if __name__ == "__main__":
    main()
