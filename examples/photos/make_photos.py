"""Makes synthetic photographs, so that the example needs no download: python examples/photos/make_photos.py"""

import argparse
import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "brown", "white")
"""One for each class."""


def photograph(dice: np.random.Generator, colour: str) -> Image.Image:
    """Returns a picture of about 500 x 375 pixels: coarse and fine structure, and a disc of the class's colour."""
    size = int(dice.integers(400, 601)), int(dice.integers(300, 451))
    picture = Image.new("RGB", size, "grey")
    for cells in (4, 16, 64, 256):
        grid = dice.integers(0, 256, (cells * 3 // 4, cells, 3), dtype=np.uint8)
        layer = Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC)
        picture = Image.blend(picture, layer, 0.3)
    radius = int(dice.integers(60, 120))
    x, y = dice.integers(radius, size[0] - radius), dice.integers(radius, size[1] - radius)
    ImageDraw.Draw(picture).ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path(__file__).resolve().parent / "data")
    parser.add_argument("--number", type=int, default=int(os.environ.get("PHOTOS_NUMBER", "3000")))
    options = parser.parse_args()
    dice, nbytes = np.random.default_rng(0), 0
    for number in range(options.number):
        colour = COLOURS[number % len(COLOURS)]
        path = options.to / colour / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(dice, colour).save(path, quality=90)
        nbytes += path.stat().st_size
    kb = nbytes / options.number / 1000
    print(f"{options.number} photographs in {os.path.relpath(options.to)}, {kb:.0f} KB each")


if __name__ == "__main__":
    main()
