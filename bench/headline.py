"""Makes the README's figures and the chart of conclusions from rows of bench/results. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

BEGIN = "<!-- Figures: python -m bench.report writes the table below. -->"
END = "<!-- End of figures. -->"
TORCH = "DataLoader"
CPU = "CPU on the trainer's node"


def row_of(rows: list[dict[str, Any]], benchmark: str, case: str, peer: str) -> dict[str, Any]:
    """Returns the only row of a comparison. Raises ValueError if there is none, or more than one."""
    (found,) = (
        row for row in rows if (row["benchmark"], row["case"], row["peer_name"]) == (benchmark, case, peer)
    )
    return found


def span(values: list[float], text: Callable[[float], str]) -> str:
    """Formats the smallest and the largest value, or a single one if both look alike."""
    least, most = text(min(values)), text(max(values))
    return least if least == most else f"{least} to {most}"


def when_to_use(rows: list[dict[str, Any]]) -> str:
    """Returns the README's table of reasons for and against the package."""
    cpu = [row_of(rows, "B3", f"{producers}: {CPU}", TORCH) for producers in ("1 producer", "2 producers")]
    start = [
        row_of(rows, "B7", f"{case}: process start to first batch", TORCH)
        for case in ("2 producers", "2 producers, persistent")
    ]
    small = row_of(rows, "B2", "0.1 MB: receiver's CPU", "pyzmq")
    ours, peers, times = (
        span([row[key] for row in cpu], form.format)
        for key, form in (("ours", "{:.2f}"), ("peer", "{:.1f}"), ("ratio", "{:.0f}"))
    )
    first, torchs = (span([row[key] for row in start], "{:.1f}".format) for key in ("ours", "peer"))
    lines = [
        ("Use it when", "Don't use it when"),
        ("---", "---"),
        (
            "GPUs wait for decoding or augmentation, and other CPUs are free",
            "you have only one machine: feeders have no more cores than torch's workers",
        ),
        (
            f"the trainer node's CPU is scarce: {ours} CPU-s/GB instead of {peers} ({times} times less)",
            f"batches are small: at 0.1 MB, pyzmq needs only {small['ratio']:.0%} of our CPU time",
        ),
        (
            "a run must be repeatable: the same bytes in the same order, with 1 or 64 feeders, even after crashes",
            f"a script runs for seconds: its first batch takes {first} s, compared with {torchs} s under torch",
        ),
        (
            "a run must resume at the next batch (Lightning, Accelerate, Transformers, torchdata)",
            "samples depend on earlier ones: samples of a map-style dataset may depend only on their index and seed",
        ),
    ]
    return "\n".join(f"| {left} | {right} |" for left, right in lines)


def with_block(readme: str, rows: list[dict[str, Any]]) -> str:
    """Returns the README with its table updated. Raises ValueError if a marker is missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{when_to_use(rows)}\n\n{END}{after}"


WIDTH, ROW, LEFT, RIGHT = 760, 30, 300, 60
"""Sizes of the chart in pixels: its width, a bar with its gap, and room for texts and for figures."""
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#59636e;stroke-width:1}
.won{fill:#1a7f37}.lost{fill:#cf222e}.neither{fill:#6e7781}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.axis{stroke:#9198a1}.won{fill:#3fb950}.lost{fill:#f85149}.neither{fill:#9198a1}}
</style>"""


BARS = (
    ("CPU on the trainer's node, decoded images", "B3", f"2 producers: {CPU}"),
    ("CPU on the trainer's node, WebDataset", "B17", f"WebDataset, 2 producers: {CPU}"),
    ("CPU on a node with eight ranks", "B16", "8 ranks: CPU of all processes on the node"),
    ("memory on a node with eight ranks", "B16", "8 ranks: memory of all processes on the node"),
    ("batches per second, same cores", "B3", "2 producers: flat out"),
    ("the same, one sample in a hundred is slow", "B8", "heavy tail, 2 producers: flat out"),
    ("the same, JPEGs decoded by feeders", "B19", "decoded by feeders: flat out"),
    ("the same, JPEGs decoded by the trainer", "B19", "decoded by the stage: flat out"),
    ("script start to first batch", "B7", "2 producers: process start to first batch"),
    ("second loader to first batch", "B7", "2 producers: second loader to its first batch"),
)
"""Each bar's text, and the comparison with torch's DataLoader that it shows."""


def chart(rows: list[dict[str, Any]]) -> str:
    """Returns BARS as SVG: horizontal bars on a logarithmic axis, which point to the right if we win."""
    bars = [(text, row_of(rows, benchmark, case, TORCH)) for text, benchmark, case in BARS]
    logs = [math.log(row["ratio"]) for _, row in bars]
    scale = (WIDTH - LEFT - RIGHT) / (max(logs) - min(0.0, *logs))
    zero, height = LEFT - min(0.0, *logs) * scale, ROW * (len(bars) + 1) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">{STYLE}',
        "<title>How many times better than torch's DataLoader</title>",
        f'<text x="{zero:.0f}" y="18" text-anchor="middle">equal to torch\'s DataLoader</text>',
        f'<line class="axis" x1="{zero:.0f}" y1="26" x2="{zero:.0f}" y2="{height - 6}"/>',
    ]
    for place, (text, row) in enumerate(bars):
        y, length = ROW * (place + 1), math.log(row["ratio"]) * scale
        x = min(zero, zero + length)
        parts += [
            f'<text x="8" y="{y + 19}">{escape(text)}</text>',
            f'<rect class="{_kind(row)}" x="{x:.1f}" y="{y + 5}" width="{abs(length):.1f}" height="{ROW - 10}"/>',
            f'<text x="{max(zero, zero + length) + 6:.1f}" y="{y + 19}">{row["ratio"]:.3g}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _kind(row: dict[str, Any]) -> str:
    return "won" if row["ratio_low"] > 1.0 else "lost" if row["ratio_high"] < 1.0 else "neither"
