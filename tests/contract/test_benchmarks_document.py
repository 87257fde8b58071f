"""docs/benchmarks.md is made of the results, and opens with every comparison, won or lost."""

from __future__ import annotations

import json
import sys

import pytest
from documents import ROOT

sys.path.insert(0, str(ROOT))
from bench import report

ROWS = [row for path in report.RESULTS.glob("*.json") for row in json.loads(path.read_text())["rows"]]
COMPARED = [row for row in ROWS if row["ratio"] is not None and not row["peer_name"].startswith("best peer")]


def table_row(benchmark: str, case: str, peer: str) -> list[str]:
    """The cells of a comparison in docs/benchmarks.md, from `ours` on."""
    section = (
        (ROOT / "docs" / "benchmarks.md").read_text().partition(f"\n## {benchmark} ")[2].partition("\n## ")[0]
    )
    (row,) = [line for line in section.splitlines() if line.startswith(f"| {case} | {peer} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][3:]


def test_the_figures_of_the_readme_are_those_of_the_table():
    readme = " ".join((ROOT / "README.md").read_text().split())
    cpu = "CPU on the trainer's node"
    one, two = (table_row("B3", f"{n}: {cpu}", "DataLoader") for n in ("1 producer", "2 producers"))
    assert f"**{float(one[2]):.1f} times less CPU on the trainer's node**" in readme
    assert (
        f"{one[0]} against {one[1]} CPU seconds per GB with one feeder, {two[0]} against {two[1]} with two"
        in readme
    )
    starts = [
        table_row("B7", f"{case}: process start to first batch", "DataLoader")
        for case in ("2 producers", "2 producers, persistent")
    ]
    ours = [f"{float(row[0]):.1f}" for row in starts]
    assert f"{min(ours)} to {max(ours)} s against {float(starts[0][1]):.1f} s" in readme


WON, LOST = 2, 3
"""Columns."""


def cells(low: float, high: float, *, benchmark: str = "B2", case: str = "0.1 MB: taken in") -> list[str]:
    """The row that one comparison makes."""
    ratio = {"ratio": (low + high) / 2, "ratio_low": low, "ratio_high": high}
    row = {"benchmark": benchmark, "case": case, "peer_name": "Peer", **ratio}
    return [cell.strip() for cell in report.in_short([row]).splitlines()[2].split("|")]


def test_the_page_is_what_the_results_say():
    assert report.main(["--check"]) == 0, "make generate writes docs/benchmarks.md anew"


@pytest.mark.parametrize(
    ("low", "high", "won", "lost"),
    [
        pytest.param(2.0, 4.0, "Peer 3", "", id="won"),
        pytest.param(0.1, 0.3, "", "Peer 5", id="lost-the-peer-is-so-many-times-better"),
        pytest.param(0.9, 1.1, "", "", id="undecided"),
    ],
)
def test_the_interval_of_a_ratio_decides_where_a_comparison_stands(low, high, won, lost):
    row = cells(low, high)
    assert (row[WON], row[LOST]) == (won, lost)


def test_what_is_undecided_is_said_below_the_table():
    row = {
        "benchmark": "B9",
        "case": "another",
        "peer_name": "Peer",
        "ratio": 1.5,
        "ratio_low": 0.9,
        "ratio_high": 2.0,
    }
    assert report.in_short([row]).endswith("holds 1: B9 another (Peer 1.5).\n")


def test_a_comparison_that_no_subject_takes_stands_for_itself():
    assert cells(2.0, 4.0, benchmark="B9", case="another")[1] == "B9 another"


def test_the_first_screen_names_every_peer_that_wins_anywhere():
    lost = " ".join(
        line.split("|")[LOST] for line in report.in_short(ROWS).splitlines() if line.startswith("|")
    )
    peers = {row["peer_name"].split(", file_")[0] for row in COMPARED if row["ratio_high"] < 1.0}
    assert peers
    assert [peer for peer in peers if f"{peer} " not in lost] == []


def test_the_table_of_the_first_screen_fits_it():
    assert len(report.in_short(ROWS).splitlines()) <= 20
