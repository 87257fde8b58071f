"""Trains a small CNN on Fashion-MNIST: an ordinary PyTorch script, alone or with DistributedDataParallel.

    python train.py
    torchrun --nproc-per-node 2 train.py
    dataloaderjob run dataloaderjob.yaml

Every option can also be given in the environment: FASHION_EPOCHS=3 is --epochs 3.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils.data
from fashion import FashionMNIST, MissingDataError
from torch import distributed, nn
from torch.utils.data.distributed import DistributedSampler

from dataloaderjob import DataLoader  # the one difference from plain PyTorch


def make_model() -> nn.Module:
    """Makes two convolutions and two linear layers: 0.2 million parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(128, 10),
    )


def make_loader(
    args: argparse.Namespace, dataset: FashionMNIST, *, rank: int, world: int, shuffle: bool
) -> torch.utils.data.DataLoader[Any]:
    """Makes the loader of one rank."""
    loader = torch.utils.data.DataLoader if args.loader == "torch" else DataLoader
    return loader(
        dataset,
        batch_size=args.batch_size,
        sampler=DistributedSampler(dataset, world, rank, shuffle=shuffle, seed=args.seed),
        num_workers=0 if args.loader == "inprocess" else args.workers,
        generator=torch.Generator().manual_seed(args.seed),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> float:
    """Trains for one epoch. Returns the mean loss of this rank's batches."""
    model.train()
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Any]) -> float:
    """Returns the share of correctly classified images, over all ranks."""
    model.eval()
    right, seen = 0, 0
    for images, labels in batches:
        right += int((model(images).argmax(1) == labels).sum())
        seen += len(labels)
    counts = torch.tensor([right, seen])
    if distributed.is_initialized():
        distributed.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main() -> None:
    args = options()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        train_set = FashionMNIST("train", limit=args.limit)
        test_set = FashionMNIST("test", limit=args.limit)
    except MissingDataError as exc:
        raise SystemExit(f"train.py: {exc}") from None
    train_loader = make_loader(args, train_set, rank=rank, world=world, shuffle=True)
    test_loader = make_loader(args, test_set, rank=rank, world=world, shuffle=False)
    record = start_record(args, rank, world)

    torch.manual_seed(args.seed)
    model = make_model()
    if world > 1:
        distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    elif args.data_parallel:
        model = nn.DataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        began = time.perf_counter()
        train_loader.sampler.set_epoch(epoch)
        train_set.augment = augmented(args, epoch)
        loss = train(model, optimizer, record.watch(train_loader, epoch) if record else train_loader)
        accuracy = evaluate(model, record.watch(test_loader, epoch) if record else test_loader)
        seconds = time.perf_counter() - began
        if record:
            record.epoch(accuracy=accuracy, loss=loss, seconds=seconds)
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.4f}, loss {loss:.4f}, {seconds:.1f} s", flush=True)
    if record:
        say_digest(record.digests(), rank, world)
    if world > 1:
        # Gloo's threads live as long as the model, and abort if one frees a tensor while the interpreter exits.
        del model
        gc.collect()  # DistributedDataParallel refers to itself
        distributed.destroy_process_group()


def augmented(args: argparse.Namespace, epoch: int) -> bool:
    """Returns False for the last epochs, which use plain images like the test."""
    return args.augment and epoch < args.epochs - args.plain_last


def start_record(args: argparse.Namespace, rank: int, world: int) -> Any:
    """Makes the record for proof.py and plot.py if --record is given."""
    if args.record is None:
        return None
    from proof import Record

    return Record(args.record, rank=rank, world=world, options=vars(args))


def say_digest(digests: list[str], rank: int, world: int) -> None:
    """Prints the digest of the batches of all ranks, on rank 0. proof.py checks it."""
    from proof import digest

    ranks = [digests] * world
    if world > 1:
        distributed.all_gather_object(ranks, digests)
    if rank == 0:
        print(f"digest {digest(ranks)[:16]} of the batches of {world} ranks", flush=True)


def options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)

    def add(name: str, default: str | None, **more: Any) -> None:
        variable = "FASHION_" + name.upper().replace("-", "_")
        parser.add_argument(f"--{name}", default=os.environ.get(variable) or default, **more)

    add("epochs", "5", type=int)
    add("augment", "1", action=argparse.BooleanOptionalAction, help="mirror, shift and blank training images")
    add("plain-last", "1", type=int, metavar="N", help="train the last N epochs without augmentation")
    add("loader", "service", help="service (feeders), inprocess (num_workers=0) or torch (its own loader)")
    add("workers", "2", type=int, help="workers, or feeders of a private service")
    add("batch-size", "100", type=int, help="batch size of each rank")
    add("lr", "0.001", type=float)
    add("seed", "0", type=int)
    add("limit", None, type=int, metavar="N", help="use the first N images only")
    add("record", None, metavar="DIR", help="record the consumed batches, for proof.py and plot.py")
    parser.add_argument("--data-parallel", action="store_true", help="wrap the model in DataParallel")
    args = parser.parse_args()
    args.augment = args.augment in (True, "1", "yes", "true")
    if args.loader not in ("service", "inprocess", "torch"):
        parser.error(f"--loader: found {args.loader!r}, use service, inprocess or torch")
    return args


if __name__ == "__main__":
    main()
