"""Trains a small CNN on photographs: an ordinary PyTorch script. python examples/photos/train.py [--loader torch]"""

import argparse
import os
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.utils.data
from PIL import Image
from torch import nn

import dataloaderjob

FOLDER = Path(__file__).resolve().parent / "data"
LOADERS = {"dataloaderjob": dataloaderjob.DataLoader, "torch": torch.utils.data.DataLoader}
SIDE = 224


class Photos(torch.utils.data.Dataset):
    """Photographs in a folder for each class: a random square, at random mirrored, as uint8, and the class."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[i]) as file:
            photo = file.convert("RGB")
        side = random.randint(SIDE, min(photo.size))
        left, top = random.randint(0, photo.width - side), random.randint(0, photo.height - side)
        photo = photo.resize((SIDE, SIDE), box=(left, top, left + side, top + side))
        if random.random() < 0.5:
            photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(photo)).permute(2, 0, 1)
        return pixels, self.classes.index(self.files[i].parent.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loader", choices=LOADERS, default="dataloaderjob")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=int(os.environ.get("PHOTOS_STEPS", "40")))
    options = parser.parse_args()
    dataset = Photos(FOLDER)
    if not len(dataset):
        parser.error(f"no photographs in {FOLDER}: run make_photos.py first")
    torch.manual_seed(1)
    loader = LOADERS[options.loader](
        dataset, batch_size=64, shuffle=True, num_workers=options.workers, drop_last=True
    )
    layers = [nn.Conv2d(3, 8, 8, 8), nn.ReLU(), nn.Conv2d(8, 32, 4, 4), nn.ReLU(), nn.AdaptiveMaxPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, len(dataset.classes)))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    began = time.perf_counter()
    batches = iter(loader)
    photos, labels = next(batches)
    started, waited, losses = time.perf_counter(), 0.0, []
    for _ in range(options.steps):
        loss = nn.functional.cross_entropy(model(photos / 255), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        asked = time.perf_counter()
        photos, labels = next(batches)
        waited += time.perf_counter() - asked
    seconds = time.perf_counter() - started
    print(
        f"{options.loader}: first batch after {started - began:.1f} s, then "
        f"{options.steps * len(labels) / seconds:.0f} photographs/s, waiting {100 * waited / seconds:.0f}% "
        f"of the time; loss {sum(losses[-10:]) / len(losses[-10:]):.2f}"
    )


if __name__ == "__main__":
    main()
