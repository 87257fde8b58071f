"""Feeders read files; the trainer's device decodes and augments: python examples/images/train.py [--device cuda]"""

import argparse
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from dataloaderjob import DataLoader
from dataloaderjob.collate import RaggedBytes, keep_bytes
from dataloaderjob.decoders import decode_jpegs

SIZE = 160


class Files(Dataset[dict[str, Any]]):
    """Undecoded JPEGs, each with the number of its folder."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Any]:
        file = self.files[i]
        return {"jpeg": file.read_bytes(), "label": self.classes.index(file.parent.name)}


def decoded(jpegs: RaggedBytes, device: torch.device) -> list[torch.Tensor]:
    """Returns pictures, uint8 of shape (3, height, width)."""
    if device.type == "cuda":
        return decode_jpegs(jpegs, device)
    files = (io.BytesIO(jpeg.numpy()) for jpeg in jpegs.views())
    pictures = [np.asarray(Image.open(file).convert("RGB")) for file in files]
    return [torch.from_numpy(picture.copy()).permute(2, 0, 1) for picture in pictures]


def augmented(picture: torch.Tensor, dice: torch.Tensor) -> torch.Tensor:
    """Returns a random square of the picture, sometimes mirrored: float32 from -1 to 1, of shape (3, SIZE, SIZE).
    `dice` has four numbers from 0 to 1."""
    _, height, width = picture.shape
    scale, down, right, mirror = dice.tolist()
    side = int(min(height, width) * (0.5 + scale / 2))
    top, left = int(down * (height - side)), int(right * (width - side))
    square = picture[None, :, top : top + side, left : left + side].float()
    scaled = interpolate(square, (SIZE, SIZE), mode="bilinear", antialias=True)[0] / 127.5 - 1
    return scaled.flip(2) if mirror < 0.5 else scaled


def stage(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """Decodes and augments a batch. The loader runs it in the trainer's process, on its own stream."""
    pictures = decoded(batch["jpeg"], generator.device)
    dice = torch.rand(len(pictures), 4, generator=generator, device=generator.device).cpu()
    return {
        "x": torch.stack([augmented(*pair) for pair in zip(pictures, dice, strict=True)]),
        "y": batch["label"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/images"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    dataset = Files(options.data)
    if not len(dataset):
        parser.error(f"no pictures in {options.data}: python examples/images/pictures.py makes some")
    torch.manual_seed(0)
    loader = DataLoader(
        dataset,
        32,
        shuffle=True,
        num_workers=2,
        collate_fn=keep_bytes,
        device=options.device,
        device_stage=stage,
    )
    layers = [nn.Conv2d(3, 32, 8, 8), nn.ReLU(), nn.Conv2d(32, 64, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, len(dataset.classes))).to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(options.epochs):
        began, right = time.monotonic(), 0
        for batch in loader:
            scores = model(batch["x"])
            nn.functional.cross_entropy(scores, batch["y"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            right += int((scores.argmax(1) == batch["y"]).sum())
        rate = len(dataset) / (time.monotonic() - began)
        print(
            f"epoch {epoch}: {right / len(dataset):.3f} right, {rate:.0f} pictures/s, on {batch['x'].device}"
        )


if __name__ == "__main__":
    main()
