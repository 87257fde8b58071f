"""Makes the example's pictures: JPEGs cut at random from the photographs of Debian's package mate-backgrounds, with a
folder for each photograph. python examples/images/pictures.py"""

import argparse
import random
from pathlib import Path

from PIL import Image

SIZE = (500, 375)
"""Average size of ImageNet's pictures: some 100 KB as JPEG, 560 KB decoded."""


def cut(photograph: Image.Image, dice: random.Random) -> Image.Image:
    """Returns a random part of the photograph, scaled to SIZE."""
    width = dice.randint(SIZE[0], min(photograph.width, photograph.height * SIZE[0] // SIZE[1]))
    height = width * SIZE[1] // SIZE[0]
    left, top = dice.randint(0, photograph.width - width), dice.randint(0, photograph.height - height)
    return photograph.resize(SIZE, box=(left, top, left + width, top + height))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photographs", type=Path, default=Path("/usr/share/backgrounds/mate/nature"))
    parser.add_argument("--to", type=Path, default=Path("data/images"))
    parser.add_argument("--each", type=int, default=100, help="pictures of each photograph")
    options = parser.parse_args()
    photographs = sorted(options.photographs.glob("*.jpg"))
    if not photographs:
        parser.error(
            f"no photographs in {options.photographs}: apt-get install mate-backgrounds, or --photographs FOLDER"
        )
    dice = random.Random(0)
    for path in photographs:
        folder = options.to / path.stem
        folder.mkdir(parents=True, exist_ok=True)
        photograph = Image.open(path).convert("RGB")
        for number in range(options.each):
            cut(photograph, dice).save(folder / f"{number:05}.jpg", quality=90)
    files = list(options.to.glob("*/*.jpg"))
    mean_kb = sum(file.stat().st_size for file in files) / len(files) / 1000
    print(f"{len(files)} pictures of {len(photographs)} photographs in {options.to}, {mean_kb:.0f} KB each")


if __name__ == "__main__":
    main()
