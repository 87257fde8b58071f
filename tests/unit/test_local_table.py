"""The table of a run: rows and rates made of snapshots, and how it fits a terminal."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core.supervision import COUNTERS
from dataloaderjob.local import console
from dataloaderjob.local.console import FeederRow, RankRow, Table, rank_rows, table_of
from dataloaderjob.local.status import WINDOW_S, History, Snapshot


def counters(**values: int) -> dict[str, int]:
    return dict.fromkeys(COUNTERS, 0) | values


def receiver(rank: str, next_calls: int, *, trainer: int = 1, **more: int) -> dict[str, Any]:
    pool = {"used_nbytes": 25, "pool_nbytes": 100, "ready": 3}
    return {
        "rank": rank,
        "trainer": trainer,
        "receiver": trainer,
        **counters(next_calls=next_calls),
        **pool,
        **more,
    }


def snapshot(
    at: float, *receivers: dict[str, Any], feeders: tuple[dict[str, Any], ...] = (), **more: Any
) -> Snapshot:
    totals = {name: sum(r[name] for r in receivers) for name in COUNTERS}
    ready = sum(f["state"] == "ready" for f in feeders)
    return Snapshot(
        at=at,
        sidecar={"totals": totals, "receivers": list(receivers)},
        supervisor={"feeders": list(feeders), "ready": ready, "desired": len(feeders), **more},
    )


def history(*snapshots: Snapshot) -> History:
    made = History()
    for one in snapshots:
        made.add(one)
    return made


READY = {"name": "feeder-0", "state": "ready", "seconds": 41.2, "why": ""}
PLACING = {"name": "feeder-1", "state": "placing", "seconds": 200.0, "why": "no node\nhas room"}


def test_a_status_becomes_rows_for_feeders_and_ranks():
    ranks = (receiver("10", 7), receiver("2", 15, nbytes=10**9, wait_ns=1, step_ns=3))
    before = snapshot(100.0, receiver("10", 7), receiver("2", 5))
    made = table_of("small", history(before, snapshot(102.0, *ranks, feeders=(READY, PLACING))))
    assert made.title == "small: feeders 1/2, 5.0 batches/s, 0.500 GB/s, stall 25.0%, pools 25%"
    assert made.feeders == (
        FeederRow("feeder-0", "ready", "41 s", ""),
        FeederRow("feeder-1", "placing", "3 min", "no node has room"),
    )
    assert made.ranks == (
        RankRow("2", "15", "5.0", "0.500", "25.0%", "25%", "3"),
        RankRow("10", "7", "0.0", "0.000", "-", "25%", "3"),
    )
    assert made.note == ""


def test_table_before_the_first_answer_has_a_title_and_a_note():
    made = table_of("small", History(), desired=2, notes=["starting: the sidecar is not listening"])
    assert made == Table(
        title="small: feeders 0/2, - batches/s, - GB/s, stall -, pools -",
        feeders=(), ranks=(), note="starting: the sidecar is not listening",
    )  # fmt: skip


def test_rates_cover_the_last_seconds():
    made = history(*(snapshot(float(at), receiver("0", at * (10 if at < 50 else 20))) for at in range(100)))
    assert (rates := made.rates()) is not None
    assert rates.batches_per_s == 20
    assert len(made._kept) <= WINDOW_S + 2


def test_new_rank_has_the_rate_of_its_last_second():
    made = history(
        snapshot(0.0), snapshot(3.0, receiver("0", 10)), snapshot(4.0, receiver("0", 30), receiver("1", 9))
    )
    assert [row.batches_per_s for row in rank_rows(made)] == ["20.0", "-"]


def test_restarted_trainer_has_no_rate_yet():
    again = history(snapshot(0.0, receiver("0", 100)), snapshot(1.0, receiver("0", 110, trainer=2)))
    assert [row.batches_per_s for row in rank_rows(again)] == ["-"]


def status_of(
    sidecar: int, at: float, *receivers: dict[str, Any], ended: dict[str, int] | None = None
) -> Snapshot:
    """A reading of the sidecar with this pid. `ended`: what receivers had counted that have ended."""
    totals = {name: (ended or {}).get(name, 0) + sum(r[name] for r in receivers) for name in COUNTERS}
    return Snapshot(at=at, sidecar={"pid": sidecar, "totals": totals, "receivers": list(receivers)})


BEFORE = status_of(
    1, 0.0, receiver("0", 4900, nbytes=4900, wait_ns=1, step_ns=9), receiver("1", 4900, nbytes=4900)
)
LAST_READ = status_of(
    1, 1.0, receiver("0", 5000, nbytes=5000, wait_ns=1, step_ns=9), receiver("1", 5000, nbytes=5000)
)
EMPTY = status_of(2, 2.0)
STALE = status_of(
    2, 2.5, receiver("0", 5040, nbytes=5000, receiver=7), receiver("1", 5000, nbytes=5000, receiver=8)
)
AFTER = status_of(
    2, 3.0, receiver("0", 5100, nbytes=80, receiver=7), receiver("1", 5100, nbytes=70, receiver=8)
)


@pytest.mark.parametrize(
    "between",
    [
        pytest.param((), id="seen-before-and-after"),
        pytest.param((Snapshot(at=1.5), EMPTY), id="seen-while-it-had-no-trainer"),
        pytest.param((EMPTY, STALE), id="seen-before-a-new-receiver-has-stored-its-counters"),
    ],
)
def test_restarted_sidecar_changes_neither_sums_nor_rates(between: tuple[Snapshot, ...]):
    """What trainers count goes on from where it was, what receivers count begins anew."""
    made = history(BEFORE, LAST_READ, *between, AFTER)
    assert made.total["next_calls"] == 10_200
    assert made.total["nbytes"] == 10_000 + 150
    rates = made.rates()
    assert rates is not None
    assert rates.batches_per_s == 400 / 3
    assert rates.nbytes_per_s == 350 / 3
    assert [row.batches_per_s for row in rank_rows(made)] == ["66.7", "66.7"]
    assert table_of("small", made).title.startswith("small: feeders 0/?, 133.3 batches/s")
    assert console.progress_line(made, 2).startswith("133.3 batches/s")


def test_ended_trainers_counts_stay_in_the_totals():
    gone = counters(next_calls=5010)
    ended = history(
        LAST_READ,
        status_of(1, 2.0, receiver("1", 5020), ended=gone),
        status_of(1, 3.0, receiver("1", 5030), ended=gone),
    )
    assert ended.total["next_calls"] == 5010 + 5030
    ended.add(status_of(1, 4.0, ended=counters(next_calls=5010 + 5040)))
    assert ended.total["next_calls"] == 5010 + 5040


def test_a_silent_sidecar_leaves_the_last_rates():
    made = history(snapshot(0.0, receiver("0", 0)), snapshot(2.0, receiver("0", 10)), Snapshot(at=3.0))
    assert table_of("small", made).title.startswith("small: feeders 0/?, 5.0 batches/s")


def test_newest_failure_comes_first_in_the_one_line_note():
    failures = [
        {"rank": "0", "feeder": "feeder-1", "reason": "UserCodeFailed", "text": "old"},
        {"rank": "1", "feeder": "", "reason": "FeederLost", "text": "a\n\x1b[2Jb"},
    ]
    assert console.note_line(["c"], failures) == "rank 1: FeederLost: a b (and 2 more)"
    assert console.note_line(["", "c"]) == "c"
    made = table_of(
        "small", history(snapshot(1.0, feeders=(PLACING,), notes=["feeder-1: no node\nhas room", "d"]))
    )
    assert made.note == "feeder-1: no node has room (and 1 more)", "a row says it otherwise"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (119.4, "119 s"), (121, "2 min"), (7199, "119 min"), (11100, "3 h 05")],
)
def test_time_span_has_a_short_text(seconds: float, text: str):
    assert console.span(seconds) == text


def of_size(num_feeders: int, num_ranks: int, ready: int) -> Table:
    return Table(
        title="job " * 40,
        feeders=[
            FeederRow(f"feeder-{i}", "ready" if i < ready else "lost", "1 s", "why")
            for i in range(num_feeders)
        ],
        ranks=[RankRow(str(i), "1", "2", "3", "4", "5", "6") for i in range(num_ranks)],
        note="note " * 40,
    )


def test_unready_feeders_are_listed_first():
    shown = console.fit_table(of_size(64, 1, 62), 10)
    assert [row.feeder for row in shown.feeders] == [
        "feeder-0",
        "feeder-1",
        "feeder-62",
        "feeder-63",
        "and 60 more",
    ]
    assert len(shown.ranks) == 1
    assert [row.rank for row in console.fit_table(of_size(1, 64, 1), 10).ranks] == [
        "0",
        "1",
        "2",
        "3",
        "and 60 more",
    ]


@given(st.integers(0, 80), st.integers(0, 80), st.integers(0, 80), st.integers(1, 100))
def test_a_table_fits_any_height(num_feeders: int, num_ranks: int, ready: int, height: int):
    assert 1 <= console.fit_table(of_size(num_feeders, num_ranks, ready), height).num_lines <= height


@pytest.mark.parametrize("width", [1, 7, 20, 79, 200])
def test_table_lines_fit_the_width_and_match_the_row_count(width: int):
    made = of_size(3, 2, 2)
    lines = re.sub(r"\x1b\[[\d;]*m", "", console.draw_table(made, width=width, height=40)).splitlines()
    assert len(lines) == made.num_lines
    assert max(map(len, lines)) <= width


def test_no_color_variable_disables_colour(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mready" in console.draw_table(of_size(1, 1, 1), width=80, height=20)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*3\d", console.draw_table(of_size(1, 1, 1), width=80, height=20))


@pytest.mark.parametrize(
    ("env", "can"), [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": ""}, False), ({}, False)]
)
def test_table_needs_a_capable_terminal(env: dict[str, str], can: bool):
    assert console.can_draw(env) == can


def test_a_table_needs_rich(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert not console.can_draw({"TERM": "xterm"})
