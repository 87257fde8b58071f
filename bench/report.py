"""Writes the documents about bench/results/*.json: `python -m bench.report [--check]`.

docs/benchmarks.md has the conclusions on one screen, with a chart. docs/benchmark-results.md has every row in a table,
wins and losses alike. README.md has a table of headline figures. SUBJECTS only groups comparisons, and names the work
for which they matter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench import headline

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
TABLES = ROOT / "docs" / "benchmark-results.md"
CHART = ROOT / "docs" / "benchmarks.svg"
README = ROOT / "README.md"
NOTES = ROOT / "bench" / "notes"
"""Markdown by benchmark (`b1-handoff.md` ...): profiles of missed targets, and attempts to meet them."""

SUBJECTS = (
    (
        "B3",
        "CPU on the trainer",
        "CPU on the trainer's node, decoded images",
        "GPU machines whose cores are few or busy",
    ),
    ("B1", "", "CPU of the training process per batch", "all training, above all with short steps"),
    ("B2", "38.5 MB", "receiving batches of 38.5 MB: CPU, GB/s", "images, audio, video"),
    ("B2", "0.1 MB", "receiving batches of 0.1 MB: CPU, GB/s", "table rows, tokens (use larger batches)"),
    (
        "B3",
        "flat out",
        "batches per second with the same number of producers",
        "feeders with no more cores than torch's workers",
    ),
    (
        "B3",
        "utilisation",
        "share of time left for computing, at 90% of that rate",
        "feeders that can keep up with the trainers",
    ),
    (
        "B7",
        "process start",
        "time from process start to the first batch",
        "scripts that run for seconds: tests, notebooks",
    ),
    (
        "B7",
        "",
        "time from a second loader, or epoch, to its first batch",
        "short epochs, validation, sweeps in one process",
    ),
    (
        "B8",
        "",
        "batches per second and CPU if one sample in a hundred takes fifty times as long",
        "documents, audio and video of widely varying length",
    ),
    (
        "B10",
        "",
        "drawing the order of an epoch: time, memory, resuming",
        "large datasets, checkpoints within an epoch",
    ),
    (
        "B14",
        "",
        "CPU of the receiver's dispatcher per ticket",
        "small batches, many feeders",
    ),
    (
        "B15",
        "",
        "links of 1 to 10 Gbit/s: share used, CPU",
        "feeders on other nodes",
    ),
    (
        "B16",
        "",
        "eight ranks on one node: CPU, memory",
        "nodes with eight accelerators",
    ),
    (
        "B17",
        "",
        "streams: throughput, CPU on the trainer's node",
        "IterableDataset, WebDataset, Hugging Face streaming",
    ),
    (
        "B18",
        "",
        "Ray Data into a trainer: throughput, CPU on the trainer's node",
        "Ray Data pipelines",
    ),
    (
        "B19",
        "",
        "JPEGs decoded by the trainer or by feeders",
        "images (the device is the CPU here)",
    ),
    (
        "B20",
        "",
        "Parquet files into one trainer: rows per second, CPU",
        "tabular data",
    ),
)
"""Rows in the page's order: benchmark, words in its case, the quantity compared, and the work for which it matters. A
comparison belongs to the first row that fits. If none fits, it gets a row of its own."""

HEAD = """# Benchmarks

For each workload, this page shows which side is better, and by what factor. All figures come from one machine with two
cores and no GPU, where feeders compete with the trainer for the same cores. The main use of feeders is on other
machines, and was not measured. [All results](benchmark-results.md) lists every figure, interval and target.
[bench/README.md](../bench/README.md) describes the method.

![How many times better than torch's DataLoader, on two cores](benchmarks.svg)

We win the comparisons with green bars, and torch's DataLoader wins those with red bars. If the 95% interval contains 1,
the bar is gray, and the table lists the comparison as *undecided*. Each number under *we lose* is the peer's
advantage over us, as a factor.
"""
READING = """# Benchmark results

`python -m bench.report` writes this page from `bench/results/*.json`; do not edit it. `make bench` measures again.

Our loader and its peers take turns. Each cell runs in its own process, and every other round reverses the order.
*Ratio* is the factor by which we are better: **below 1, we lose**. It is the median of the rounds' ratios, with a
bootstrap 95% interval.

We set two promises: a *floor*, which must hold, and a *target*, which is the aim. If a row names a peer, both apply to
the ratio; otherwise, they apply to our own figure. *Met* names the promise that even the worse end of the interval
meets. Every cell verified the bytes that it received. [bench/README.md](../bench/README.md) describes the method.

`ray.get` from the same store uses no network. All figures come from one machine with two cores and no GPU. They show
nothing about network cards, copies to a GPU, or machines with more cores.
"""


def main(arguments: list[str] | None = None) -> int:
    """Writes the files. With --check, only compares them, and returns 1 if any differs."""
    made = files([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])
    if "--check" in (sys.argv[1:] if arguments is None else arguments):
        stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
        print(
            f"{', '.join(stale)}: run python -m bench.report"
            if stale
            else "the documents match these results"
        )
        return bool(stale)
    for path, text in made.items():
        path.write_text(text)
    return 0


def files(results: list[dict[str, Any]]) -> dict[Path, str]:
    """Returns all files that are made from results, with their texts."""
    rows = [row for found in results for row in found["rows"]]
    return {
        PAGE: "\n".join([HEAD, in_short(rows)]),
        CHART: headline.chart(rows),
        TABLES: "\n".join([READING, _summary(results), *map(_section, results)]),
        README: headline.with_block(README.read_text(), rows),
    }


def in_short(rows: list[dict[str, Any]]) -> str:
    """Returns the table of conclusions. The interval of a ratio decides if a comparison is won, lost or undecided."""
    found: dict[tuple[int, str, str], dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        if row["ratio"] is None or row["peer_name"].startswith("best peer"):  # that peer has a row of its own
            continue
        verdict = "won" if row["ratio_low"] > 1.0 else "lost" if row["ratio_high"] < 1.0 else "undecided"
        peers = found.setdefault(_subject(row), {}).setdefault(verdict, {})
        times = peers.setdefault(row["peer_name"].split(", file_")[0], [])
        times.append(1 / row["ratio"] if verdict == "lost" else row["ratio"])
    lines = ["| quantity | we win | we lose | undecided | matters for |", "|---|---|---|---|---|"]
    for (_, what, work), verdicts in sorted(found.items()):
        won, lost, neither = (_by_peer(verdicts.get(key, {})) for key in ("won", "lost", "undecided"))
        lines.append(f"| {what} | {won} | {lost} | {neither} | {work} |")
    return "\n".join(lines) + "\n"


def _by_peer(peers: dict[str, list[float]]) -> str:
    return "; ".join(f"{peer} {headline.span(times, number)}" for peer, times in peers.items())


def _subject(row: dict[str, Any]) -> tuple[int, str, str]:
    for place, (benchmark, words, what, work) in enumerate(SUBJECTS):
        if row["benchmark"] == benchmark and words in row["case"]:
            return place, what, work
    return len(SUBJECTS), f"{row['benchmark']} {row['case']}", ""


def _summary(results: list[dict[str, Any]]) -> str:
    rows = [row for found in results for row in found["rows"]]
    lost = [r for r in rows if r["ratio"] is not None and r["ratio_high"] < 1.0]
    promised = [r for r in rows if r["target"] is not None or r["floor"] is not None]
    partly = [r for r in promised if r["met"] == "floor" and r["target"] is not None]
    counts = {met: sum(1 for r in promised if r["met"] == met) for met in ("no", "missing")}
    kept = len(promised) - len(partly) - counts["no"] - counts["missing"]
    compared = sum(1 for r in rows if r["ratio"] is not None)
    intro = (
        f"Of {len(promised)} promises, {kept} are met, {len(partly)} meet their floor but not their target, "
        f"{counts['no']} meet neither, and {counts['missing']} were not measured. "
        f"In {len(lost)} of {compared} comparisons, the peer is better.\n"
    )
    lines = ["## Missed promises and lost comparisons\n", intro]
    missed = [r for r in promised if r["met"] == "no" or r in partly]
    if missed or lost:
        lines += [f"- {r['benchmark']} {r['case']}{against(r)}: {figure_text(r)}" for r in missed]
        lines += [
            f"- {r['benchmark']} {r['case']}{against(r)}: {figure_text(r)}" for r in lost if r not in missed
        ]
        lines.append("")
    return "\n".join(lines)


def _section(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    load, machine = found["load"], found["machine"]
    measured = (
        f"{found['date'][:10]}, commit {found['commit']}, {machine['cpus']} x {machine['cpu']}, "
        f"{machine['memory_gb']} GB; {versions}. The load average reached {load['load1_max']:.1f}. "
        f"During a cell, other processes took at most {load['foreign_share_max']:.0%} of the CPU time, and the "
        f"hypervisor at most {load['steal_share_max']:.0%} (steal time). "
        f"{load['rounds_run_again']} rounds were repeated.\n"
    )
    lines = [
        f"## {found['benchmark']}  {found['title']}\n",
        "| case | peer | unit | ours | peer's | ratio | 95% interval | floor | target | met |",
        "|---|---|---|--:|--:|--:|---|--:|--:|---|",
        *(_line(row) for row in found["rows"]),
        "",
        measured,
    ]
    lines += [f"Missing: {what} ({why}).\n" for what, why in found["missing"].items()]
    if found["failed_cells"]:
        lines.append(f"{found['failed_cells']} cells failed and have no figure.\n")
    lines += [
        f"Notes: [{note.stem}](../bench/notes/{note.name}).\n"
        for note in sorted(NOTES.glob(f"{found['benchmark'].lower()}-*.md"))
    ]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    interval = ("ratio_low", "ratio_high") if row["peer_name"] else ("ours_low", "ours_high")
    ends = [number(row.get(key)) for key in interval]
    met = {"target": "target", "floor": "floor", "no": "**no**", "missing": "not measured", None: ""}[
        row["met"]
    ]
    if row["ratio"] is not None and row["ratio_high"] < 1.0:
        met = f"{met} (we lose)".strip()
    cells = [
        row["case"], row["peer_name"] or "", row["unit"], number(row["ours"]), number(row["peer"]),
        number(row["ratio"]), " to ".join(ends) if all(ends) else "", number(row["floor"]),
        number(row["target"]), met,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def figure_text(row: dict[str, Any]) -> str:
    """Formats the figure, the interval and the promises of a row in one phrase."""
    promised = ", ".join(f"{k} {number(row[k])}" for k in ("floor", "target") if row[k] is not None)
    if row["met"] == "missing":
        found = "not measured"
    elif row["peer_name"]:
        found = f"{number(row['ratio'])} times ({number(row['ratio_low'])} to {number(row['ratio_high'])})"
        found += f", ours {number(row['ours'])}, peer {number(row['peer'])} {row['unit']}"
    else:
        found = f"{number(row['ours'])} {row['unit']}"
        if "ours_low" in row:
            found += f" ({number(row['ours_low'])} to {number(row['ours_high'])})"
    return f"{found}; {promised}" if promised else found


def number(value: float | None) -> str:
    """Formats a number with three significant digits and separated thousands; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def against(row: dict[str, Any]) -> str:
    """Names the peer of a row, to follow the case; empty if there is none."""
    return f", against {row['peer_name']}" if row["peer_name"] else ""


if __name__ == "__main__":
    sys.exit(main())
