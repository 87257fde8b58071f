"""Draws accuracy and stall of a run: `python plot.py out` writes out/run.png."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from proof import ProofError, load

BLUE, SHADES = "#1f5a96", ("#1f5a96", "#7fb0de", "#c9791b", "#ecbf85")


def stall(record: dict[str, Any], epoch: int) -> float:
    """Returns the percentage of an epoch's training pass that one rank waited for batches, the first included."""
    (one,) = (p for p in record["passes"] if p["epoch"] == epoch and p["split"] == "train")
    return 100 * one["wait_s"] / one["seconds"]


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Draws two charts over the epochs: accuracy on the test images, and each rank's stall."""
    accuracies = [100 * epoch["accuracy"] for epoch in records[0]["epochs"]]
    epochs = range(1, len(accuracies) + 1)
    figure = Figure(figsize=(7, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(epochs, accuracies, marker="o", color=BLUE)
    for epoch, accuracy in zip(epochs, accuracies, strict=True):
        above.annotate(
            f"{accuracy:.1f}", (epoch, accuracy), xytext=(0, 6), textcoords="offset points", ha="center"
        )
    above.margins(y=0.2)
    above.set(ylabel="accuracy, %", title="Fashion-MNIST: accuracy on the test images")
    width = 0.8 / len(records)
    for i, record in enumerate(records):
        places = [epoch - 0.4 + width * (i + 0.5) for epoch in epochs]
        values = [stall(record, epoch - 1) for epoch in epochs]
        below.bar(places, values, width, label=f"rank {record['rank']}", color=SHADES[i % len(SHADES)])
    below.set(xlabel="epoch", ylabel="stall, %", title="Share of the time spent waiting for a batch")
    below.set_ylim(0, max(10.0, below.get_ylim()[1]))
    below.legend()
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the --record folder of train.py")
    folder = parser.parse_args().folder
    try:
        draw(load(folder), folder / "run.png")
    except ProofError as exc:
        print(f"no picture: {exc}", file=sys.stderr)
        return 1
    print(f"accuracy and stall: {folder / 'run.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
