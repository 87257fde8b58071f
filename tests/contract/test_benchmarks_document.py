"""The documents with figures are made of the results, and the page of conclusions has every comparison, won or lost."""

from __future__ import annotations

import json
import sys

import pytest
from documents import ROOT

sys.path.insert(0, str(ROOT))
from bench import headline, report

ROWS = [row for path in report.RESULTS.glob("*.json") for row in json.loads(path.read_text())["rows"]]
COMPARED = [row for row in ROWS if row["ratio"] is not None and not row["peer_name"].startswith("best peer")]


def test_readme_lists_wins_and_losses_with_the_results_figures():
    table = headline.when_to_use(ROWS)
    row = headline.row_of(ROWS, "B3", "2 producers: CPU on the trainer's node", "DataLoader")
    assert f"{row['ours']:.2f}" in table
    assert "pyzmq" in table
    assert table in (ROOT / "README.md").read_text()
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_a_readme_without_its_markers_is_rejected():
    with pytest.raises(ValueError, match=r"README\.md needs the lines"):
        headline.with_block("# A project\n", ROWS)


def test_the_chart_has_wins_and_losses():
    drawn = headline.chart(ROWS)
    assert drawn.count("<rect") == len(headline.BARS)
    assert 'class="won"' in drawn
    assert 'class="lost"' in drawn


WON, LOST, UNDECIDED = 2, 3, 4
"""Columns."""


def cells(low: float, high: float, *, benchmark: str = "B2", case: str = "0.1 MB: throughput") -> list[str]:
    """The row that one comparison makes."""
    ratio = {"ratio": (low + high) / 2, "ratio_low": low, "ratio_high": high}
    row = {"benchmark": benchmark, "case": case, "peer_name": "Peer", **ratio}
    return [cell.strip() for cell in report.in_short([row]).splitlines()[2].split("|")]


def test_documents_with_figures_match_the_results():
    assert report.main(["--check"]) == 0, "run make generate"


def test_the_page_of_conclusions_fits_a_screen():
    assert len(report.PAGE.read_text().splitlines()) <= 40


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


def test_an_interval_that_contains_one_is_undecided():
    row = cells(0.9, 2.1, benchmark="B9", case="another")
    assert (row[WON], row[LOST], row[UNDECIDED]) == ("", "", "Peer 1.5")


def test_comparison_without_a_subject_forms_its_own_group():
    assert cells(2.0, 4.0, benchmark="B9", case="another")[1] == "B9 another"


def test_the_first_screen_names_every_peer_that_wins_anywhere():
    lost = " ".join(
        line.split("|")[LOST] for line in report.in_short(ROWS).splitlines() if line.startswith("|")
    )
    peers = {row["peer_name"].split(", file_")[0] for row in COMPARED if row["ratio_high"] < 1.0}
    assert peers
    assert [peer for peer in peers if f"{peer} " not in lost] == []


def test_summary_table_fits_the_first_screen():
    assert len(report.in_short(ROWS).splitlines()) <= 20
