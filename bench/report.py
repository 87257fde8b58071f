"""Writes what people read of bench/results/*.json: `python -m bench.report [--check]`.

docs/benchmarks.md has the conclusions on one screen, with a chart. docs/benchmark-results.md has every row in a table,
wins and losses alike. README.md has a table of headline figures. SUBJECTS only groups comparisons, and names the work
that they matter for.
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
"""Markdown by benchmark (`b1-handoff.md` ...): profiles of missed targets and what was tried."""

SUBJECTS = (
    (
        "B3",
        "CPU on the trainer",
        "CPU on the trainer's node, decoded images",
        "GPU machines whose cores are few or busy",
    ),
    ("B1", "", "CPU of the training process to take a batch", "every step, the more the shorter steps are"),
    ("B2", "38.5 MB", "taking in batches of 38.5 MB: CPU, GB/s", "images, audio, video"),
    ("B2", "0.1 MB", "taking in batches of 0.1 MB: CPU, GB/s", "rows of tables, tokens: take larger batches"),
    (
        "B3",
        "flat out",
        "batches per second, the same number of producers",
        "feeders with no more cores than torch's workers",
    ),
    (
        "B3",
        "utilisation",
        "time left to compute at 0.9 of that rate",
        "feeders that can keep up with the trainers",
    ),
    (
        "B7",
        "process start",
        "process start to the first batch",
        "scripts that run for seconds: tests, notebooks",
    ),
    (
        "B7",
        "",
        "a second loader, or epoch, to its first batch",
        "short epochs, validation, sweeps in one process",
    ),
    (
        "B8",
        "",
        "one sample of a hundred takes fifty times as long",
        "documents, audio, video of very different length",
    ),
    (
        "B10",
        "",
        "the order of an epoch: time, memory, resuming",
        "large datasets, checkpoints within an epoch",
    ),
    (
        "B14",
        "",
        "a ticket in the receiver's dispatcher: CPU",
        "small batches, many feeders",
    ),
    (
        "B15",
        "",
        "links of 1 to 10 Gbit/s: share that is used, CPU",
        "feeders on other nodes",
    ),
    (
        "B16",
        "",
        "eight ranks on one node: its CPU, its memory",
        "nodes with eight accelerators",
    ),
    (
        "B17",
        "",
        "streams: throughput, CPU on the trainer's node",
        "IterableDatasets, WebDataset, HF streaming",
    ),
    (
        "B18",
        "",
        "Ray Data into a trainer: throughput, CPU on the trainer's node",
        "pipelines of Ray Data",
    ),
    (
        "B19",
        "",
        "JPEGs that are decoded where batches are taken, or by feeders",
        "pictures; the device is the CPU here",
    ),
    (
        "B20",
        "",
        "Parquet files into one trainer: rows a second, CPU",
        "tabular data",
    ),
)
"""Rows in the page's order: benchmark, words in its case, the quantity compared, the work that it matters for. The
first row that fits takes a comparison. A comparison that fits no row gets its own."""

HEAD = """# Benchmarks

How many times better the winner is, and for which workloads. All figures come from one machine with two cores and no
GPU, where feeders compete with the trainer for the same cores. The case that feeders are made for, CPUs elsewhere, is
not measured. [All results](benchmark-results.md) has every figure, interval and target;
[How they measure](../bench/README.md) has the method.

![How many times better than torch's DataLoader, on two cores](benchmarks.svg)

Green bars: we win. Red bars: torch's DataLoader wins. Grey bars, and *undecided* below: the 95 % interval contains 1.
"""
READING = """# Benchmark results

`python -m bench.report` writes this page from `bench/results/*.json`; do not edit it. `make bench` measures again.

Ours and the peers run in the same job, interleaved. Each cell has a process of its own, and every other round reverses
the order. *Ratio* is the median of the ratios within a round, with its bootstrap 95 % interval. It says how many times
better ours is: **below 1 we lose**.

A *floor* must hold and a *target* is the aim. We set both. Each is for the ratio if a peer is named, and for our own
figure otherwise. *Met* names the promise that the worse end of the interval still meets. Every cell verified the bytes
that it received. The method is in [bench/README.md](../bench/README.md).

`ray.get` within one store uses no network. One machine without a GPU cannot show network cards, copies to a GPU, or
more than two cores.
"""


def main(arguments: list[str] | None = None) -> int:
    """Writes the files; with --check only compares them, and returns 1 if one differs."""
    made = files([json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))])
    if "--check" in (sys.argv[1:] if arguments is None else arguments):
        stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
        print(
            f"{', '.join(stale)}: run python -m bench.report" if stale else "the documents have these results"
        )
        return bool(stale)
    for path, text in made.items():
        path.write_text(text)
    return 0


def files(results: list[dict[str, Any]]) -> dict[Path, str]:
    """All files that are made of results, with their texts."""
    rows = [row for found in results for row in found["rows"]]
    return {
        PAGE: "\n".join([HEAD, in_short(rows)]),
        CHART: headline.chart(rows),
        TABLES: "\n".join([READING, _summary(results), *map(_section, results)]),
        README: headline.with_block(README.read_text(), rows),
    }


def in_short(rows: list[dict[str, Any]]) -> str:
    """The first screen: each comparison is won, lost or undecided, by the interval of its ratio."""
    found: dict[tuple[int, str, str], dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        if row["ratio"] is None or row["peer_name"].startswith("best peer"):  # that peer has a row of its own
            continue
        verdict = "won" if row["ratio_low"] > 1.0 else "lost" if row["ratio_high"] < 1.0 else "undecided"
        peers = found.setdefault(_subject(row), {}).setdefault(verdict, {})
        times = peers.setdefault(row["peer_name"].split(", file_")[0], [])
        times.append(1 / row["ratio"] if verdict == "lost" else row["ratio"])
    lines = ["| compared | we win | we lose | undecided | matters for |", "|---|---|---|---|---|"]
    for (_, what, work), verdicts in sorted(found.items()):
        won, lost, neither = (_beside_whom(verdicts.get(key, {})) for key in ("won", "lost", "undecided"))
        lines.append(f"| {what} | {won} | {lost} | {neither} | {work} |")
    return "\n".join(lines) + "\n"


def _beside_whom(peers: dict[str, list[float]]) -> str:
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
    counts = {
        met: sum(1 for r in promised if r["met"] == met) for met in ("target", "floor", "no", "missing")
    }
    compared = sum(1 for r in rows if r["ratio"] is not None)
    intro = (
        f"Of {len(promised)} promises {counts['target']} meet their target, "
        f"{counts['floor']} their floor only, {counts['no']} neither, {counts['missing']} were not measured. "
        f"In {len(lost)} of {compared} comparisons the peer is better.\n"
    )
    lines = ["## Promises missed, comparisons lost\n", intro]
    missed = [r for r in promised if r["met"] in ("no", "floor")]
    if missed or lost:
        lines += [f"- {r['benchmark']} {r['case']}{_beside(r)}: {figure_text(r)}" for r in missed]
        lines += [
            f"- {r['benchmark']} {r['case']}{_beside(r)}: {figure_text(r)}" for r in lost if r not in missed
        ]
        lines.append("")
    return "\n".join(lines)


def _section(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    load, machine = found["load"], found["machine"]
    measured = (
        f"{found['date'][:10]}, commit {found['commit']}, {machine['cpus']} x {machine['cpu']}, "
        f"{machine['memory_gb']} GB; {versions}. Load average up to {load['load1_max']:.1f}; other "
        f"processes took up to {load['foreign_share_max']:.0%} of the CPU during a cell, the host up to "
        f"{load['steal_share_max']:.0%}; {load['rounds_run_again']} rounds were run again.\n"
    )
    lines = [
        f"## {found['benchmark']}  {found['title']}\n",
        "| case | beside | unit | ours | peer | ratio | 95 % | floor | target | met |",
        "|---|---|---|--:|--:|--:|---|--:|--:|---|",
        *(_line(row) for row in found["rows"]),
        "",
        measured,
    ]
    lines += [f"Missing: {what} ({why}).\n" for what, why in found["missing"].items()]
    if found["failed_cells"]:
        lines.append(f"{found['failed_cells']} cells failed and give no figure.\n")
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
    """Figure, interval and promise of a row in one phrase."""
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
    """Three significant digits, thousands apart; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _beside(row: dict[str, Any]) -> str:
    return f" beside {row['peer_name']}" if row["peer_name"] else ""


if __name__ == "__main__":
    sys.exit(main())
