"""Fashion-MNIST as a map-style Dataset that can augment its images. It is independent of loaders and training.

It reads the four idx files of the data set, gzip-compressed or not, from the folder FASHION_MNIST. The default is the
folder of Debian's package `dataset-fashion-mnist`.
"""

from __future__ import annotations

import gzip
import math
import os
import random
import struct
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset

FOLDER = "/usr/share/datasets/fashion-mnist"
"""Folder of Debian's package `dataset-fashion-mnist`."""
FILES = {"train": "train", "test": "t10k"}
SIDE = 28
MEAN, STD = 0.2860, 0.3530
"""Mean and standard deviation of the training images, as fractions of 255."""
MAX_SHIFT = 2
"""Most pixels of a shift, in each direction."""
ERASE = 8
"""Side of the square that is blanked, in pixels."""

Split = Literal["train", "test"]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class MissingDataError(FileNotFoundError):
    """The data set is not on this machine. The message explains how to get it."""


class FashionMNIST(Dataset[tuple[torch.Tensor, int]]):
    """Pairs (image, label): float32 of shape (1, 28, 28), about normal, and 0 to 9.

    `augment` may change between epochs. Random changes of an image use `random`, numpy's and torch's default
    generators, as in any Dataset. The loader seeds all three for each sample.
    """

    def __init__(
        self, split: Split, *, augment: bool = False, limit: int | None = None, folder: str | None = None
    ) -> None:
        """Reads the first `limit` images. Raises MissingDataError, or ValueError for a damaged file."""
        where = Path(folder or os.environ.get("FASHION_MNIST") or FOLDER)
        self.images = _read(where, f"{FILES[split]}-images-idx3-ubyte", ndim=3)[:limit]
        self.labels = _read(where, f"{FILES[split]}-labels-idx1-ubyte", ndim=1)[:limit]
        if len(self.images) != len(self.labels):
            raise ValueError(f"{where}: {len(self.images)} {split} images, but {len(self.labels)} labels")
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        pixels = torch.from_numpy(np.ascontiguousarray(shifted(image)) if self.augment else image)
        x = pixels.to(torch.float32).div_(255 * STD).sub_(MEAN / STD)
        if self.augment:
            erase(x)
        return x.unsqueeze(0), int(self.labels[index])


def shifted(image: Bytes) -> Bytes:
    """Mirrors every second image on average, and shifts each by up to MAX_SHIFT pixels. `image` is (28, 28)."""
    if random.random() < 0.5:
        image = image[:, ::-1]
    canvas = np.zeros((SIDE + 2 * MAX_SHIFT, SIDE + 2 * MAX_SHIFT), dtype=np.uint8)
    canvas[MAX_SHIFT : MAX_SHIFT + SIDE, MAX_SHIFT : MAX_SHIFT + SIDE] = image
    y, x = np.random.randint(0, 2 * MAX_SHIFT + 1, size=2)
    return canvas[y : y + SIDE, x : x + SIDE]


def erase(x: torch.Tensor) -> None:
    """Blanks a square in every second image on average, in place. `x` is (28, 28)."""
    chance, top, left = torch.rand(3).tolist()
    if chance < 0.5:
        y, z = int(top * (SIDE - ERASE)), int(left * (SIDE - ERASE))
        x[y : y + ERASE, z : z + ERASE] = 0.0


def _read(folder: Path, name: str, *, ndim: int) -> Bytes:
    """Returns the array of one idx file of bytes."""
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            return _parse(content, path, ndim)
    raise MissingDataError(
        f"Fashion-MNIST is needed, and {folder} has no {name}.gz. On Debian or Ubuntu: apt-get install "
        "dataset-fashion-mnist. Elsewhere: take the four .gz files of data/fashion in "
        "https://github.com/zalandoresearch/fashion-mnist and set FASHION_MNIST to their folder"
    )


def _parse(content: bytes, path: Path, ndim: int) -> Bytes:
    header = struct.Struct(f">HBB{ndim}I")  # zero, type (8: bytes), number of dimensions, sizes
    if len(content) < header.size:
        raise ValueError(f"{path}: an idx file begins with {header.size} bytes, found {len(content)} in all")
    zero, kind, dims, *shape = header.unpack_from(content)
    if (zero, kind, dims) != (0, 8, ndim) or len(content) != header.size + math.prod(shape):
        raise ValueError(f"{path}: no whole idx file of bytes in {ndim} dimensions: get the file again")
    return np.frombuffer(bytearray(content), dtype=np.uint8, offset=header.size).reshape(shape)
