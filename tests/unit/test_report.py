"""The report of a run: what is kept, what is found in it, and the page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.timings import BUCKETS, Entry, Sums, Times, bucket_of
from dataloaderjob.local.reporting import command, events, rundata, series
from dataloaderjob.local.reporting.analysis import Analysis
from dataloaderjob.local.reporting.keeper import Keeper
from dataloaderjob.local.reporting.page import render
from dataloaderjob.local.reporting.rundata import RunData
from dataloaderjob.local.reporting.series import (
    LOST,
    MEMORY,
    MOST_EVENTS,
    MOST_READINGS,
    REPLACED,
    SERIES_FILE,
    STARTED,
    Event,
    RankReading,
    Reading,
    Series,
)
from dataloaderjob.local.status import Snapshot

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} & "quoted" $\\frac'


def reading(at: float, calls: int, waited: float = 0.5, **changed: Any) -> Reading:
    """A run of one rank that takes two batches a second."""
    wait, step = int(calls * 0.5e9 * waited), int(calls * 0.5e9 * (1 - waited))
    rank = RankReading(calls, wait, step, 1000 * calls, 4)
    counts = {"next_calls": calls, "wait_ns": wait, "step_ns": step, "nbytes": 1000 * calls}
    made = {
        "at": at, "ranks": {"0": rank}, "feeders": 2, "desired": 2, "counts": counts,
        "cpu": {"rank 0": 0.1 * at, "feeder-0, batches": 0.8 * at, "sidecar": 0.01 * at},
    }  # fmt: skip
    return Reading(**{**made, **changed})


def times(slow: int = 0, *, queued: float = 0.0, text: str = "index 5") -> Times:
    """100 batches of 200 ms, `slow` of them of 4 s."""
    made = Times(buckets=[0] * BUCKETS)
    made.buckets[bucket_of(200 * 10**6)] = 100 - slow
    made.buckets[bucket_of(4 * 10**9)] = slow
    wall = (100 - slow) * 200 * 10**6 + slow * 4 * 10**9
    made.sums = Sums(
        count=100, nbytes=100_000, samples=800, wall_ns=wall, cpu_ns=int(wall * (1 - queued)),
        queued_ns=int(wall * queued), fetch_ns=wall, squares=100 * 0.04,
    )  # fmt: skip
    made.batches = [Entry(4 * 10**9, 10**9, 3, 3 * 10**9, -1, text)]
    made.samples = [Entry(3 * 10**9, at_s * 10**9, 3, 0, -1, text) for at_s in (1, 2, 30)]
    return made


def run(
    *, waited: float = 0.5, name: str = "train", happened: list[Event] | None = None, **changed: Any
) -> RunData:
    readings = [reading(float(at), 2 * at, waited) for at in range(60)]
    about = {"name": name, "started": 1e9, "provider": "local", "cpus": 2}
    return RunData(about, Series(readings, happened or []), changed.pop("times", times()), **changed)


def overloaded(own: float) -> RunData:
    """A run on a machine without a free CPU, `own` of whose two CPUs it uses itself."""
    data = run(waited=0.6, times=times(queued=0.7))
    data.series.readings[:] = [
        replace(r, cpu={"feeder-0, batches": 2 * own * r.at}) for r in data.series.readings
    ]
    return data


class Page(HTMLParser):
    """What a browser would show, and what it would run or load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags, self.links = "", set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name in ("src", "href", "xlink:href", "data") and value is not None:
                self.links.append(value)

    def handle_data(self, data: str) -> None:
        self.words += data


# The page


def test_text_of_users_shows_as_text():
    happened = [Event(5.0, HOSTILE, STARTED, HOSTILE), Event(9.0, "feeder-0", LOST, HOSTILE)]
    page = Page(render(run(name=HOSTILE, happened=happened, times=times(9, text=HOSTILE))))
    assert not page.tags & {"script", "img", "iframe", "object", "embed", "link", "base", "form"}
    assert page.words.count(HOSTILE) > 5
    assert "49" not in page.words.split(HOSTILE)[0][-4:]


def test_page_needs_no_network():
    text = render(run(times=times(5)))
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import", text)
    assert len(text) < 500_000


def test_ids_of_a_page_are_distinct():
    ids = re.findall(r'\bid="([^"]*)"', render(run(happened=[Event(9.0, "feeder-0", LOST, "killed")])))
    assert len(ids) == len(set(ids))
    assert ids


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (run(waited=0.02), "Not limited by input"),
        (run(waited=0.6), "Limited by input: training waited for input for 60% of its time."),
        (overloaded(own=0.95), "The machine has too few CPUs (2): feeders were ready"),
        (overloaded(own=0.2), "This run kept only 0.4 of 2 CPUs busy, and still feeders were ready"),
        (overloaded(own=0.2), "1 feeder with a free CPU would suffice. This run had 2."),
        (run(waited=0.6, times=times(queued=0.1)), "So something else kept training waiting"),
        (run(waited=0.6, times=times(6)), "A few slow batches hold up the rest: 6 of 100"),
        (run(waited=0.6, times=times(6)), "These samples were slow more than once: index 5 (2 times)."),
        (run(), "Training took its last batch by 59.0 s. The run ended by 59.0 s."),
        (run(happened=[Event(3.0, "trainer-1", "failed", "ended with exit code 3")]), "The run failed: trainer-1"),
        (run(is_live=True), "The run is still in progress"),
        (run(times=Times()), "No feeder of this run measured any"),
        (RunData({"name": "x", "started": 1.0}, Series(), Times()), "No batch was taken yet"),
        (RunData({"name": "x", "started": 1.0}, Series([reading(9.0, 0, feeders=0)]), Times()), "No feeder has served"),
    ],
    ids=[
        "fast", "slow", "overloaded", "overloaded-by-others", "enough", "unknown", "tail", "again", "ended", "failed",
        "live", "elsewhere", "empty", "starting",
    ],
)  # fmt: skip
def test_page_says_what_happened(data: RunData, said: str):
    assert said in Page(render(data)).words


def test_lost_feeder_is_told_with_its_replacement():
    happened = [
        Event(1.0, "feeder-1", STARTED, "serves (pid 5)"),
        Event(20.0, "feeder-1", LOST, "its process was killed by SIGKILL"),
        Event(22.5, "feeder-1", STARTED, "serves (pid 6)"),
    ]
    words = Page(render(run(happened=happened))).words
    assert "[1] At 20.0 s feeder-1 was lost: its process was killed by SIGKILL." in words
    assert "Another process replaced it 2.5 s later. Training waited for 50% of its time before" in words


def test_many_ranks_share_one_line():
    ranks = {str(rank): RankReading(10, 10**9, 10**9, 10, 3) for rank in range(64)}
    readings = [reading(float(at), at, ranks=ranks) for at in range(5)]
    text = render(RunData({"name": "x", "started": 1.0}, Series(readings), Times()))
    assert "middle rank" in text
    assert len(text) < 600_000


# Events


def feeder(state: str = "ready", instance: str = "a", **more: Any) -> dict[str, Any]:
    return {
        "name": "feeder-0",
        "state": state,
        "instance": instance,
        "pid": 5,
        "why": "",
        "cause": None,
        **more,
    }


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ({}, {"feeders": [feeder()]}, [STARTED]),
        ({"feeders": [feeder()]}, {"feeders": [feeder()]}, []),
        ({"feeders": [feeder()]}, {"feeders": [feeder("lost", why="killed")]}, [LOST]),
        ({"feeders": [feeder()]}, {"feeders": [feeder(instance="b")]}, [REPLACED]),
        ({"feeders": [feeder()]}, {"feeders": [feeder("lost", cause="OutOfMemory", why="16 GB")]}, [MEMORY]),
        ({"feeders": [feeder(cause="OutOfMemory", why="a")]}, {"feeders": [feeder(cause="OutOfMemory", why="a")]}, []),
        ({"feeders": [feeder()]}, {}, []),
        ({"feeders": [feeder()]}, {"feeders": []}, [LOST]),
        ({"feeders": [], "desired": 1}, {"feeders": [], "desired": 3}, ["scaled"]),
        ({"feeders": []}, {"feeders": [], "failures": [{"rank": "1", "reason": "x", "text": "y"}]}, ["failed"]),
    ],
    ids=["start", "same", "lost", "replaced", "memory", "still", "silent", "unwanted", "scaled", "failure"],
)  # fmt: skip
def test_event_is_found_between_two_statuses(before: Any, after: Any, kinds: list[str]):
    assert [event.kind for event in events.found(1.0, before, after)] == kinds


# What is kept


@given(st.lists(st.floats(0.01, 5.0), max_size=300), st.integers(1, 3))
def test_kept_readings_are_bounded_and_end_with_the_newest(steps: list[float], times_: int):
    kept, at = Series(), 0.0
    for number, step in enumerate(steps * times_ * 4):
        at += step
        if kept.is_due(at):
            kept.add(reading(at, number))
            assert kept.readings[-1].at == at
    assert len(kept.readings) <= MOST_READINGS
    assert [r.at for r in kept.readings] == sorted(r.at for r in kept.readings)


def test_series_survives_its_file_and_a_torn_last_line(tmp_path: Path):
    keeper = Keeper(tmp_path / "report", tmp_path / "times", {"name": "x"})
    receiver = {"rank": "0", "trainer": 1, "receiver": 2, "ready": 3, "next_calls": 4}
    sidecar = {"pid": 1, "receivers": [receiver], "totals": {"next_calls": 4}}
    keeper.see(
        Snapshot(at=1.0, sidecar=sidecar, supervisor={"feeders": [feeder()], "ready": 1, "desired": 1})
    )
    keeper.tell("trainer-0", "failed", "ended with exit code 1\n")
    keeper.close(Snapshot(at=2.0, sidecar={}, supervisor={}))
    path = tmp_path / "report" / SERIES_FILE
    path.write_text(path.read_text() + '{"at": 3, "ranks"')
    data = rundata.find(str(tmp_path))
    assert [event.kind for event in data.series.events] == [STARTED, "failed"]
    assert data.series.readings[0].ranks["0"] == RankReading(4, 0, 0, 0, 3)
    assert Analysis(data).batches == 4


def test_a_long_run_keeps_a_small_file(tmp_path: Path):
    keeper = Keeper(tmp_path / "report", tmp_path / "times", {"name": "x"})
    keeper._series.every_s = -1.0
    for at in range(2 * MOST_READINGS):
        keeper._series.every_s = -1.0
        keeper.see(Snapshot(at=float(at), supervisor={"feeders": [feeder(instance=str(at))], "ready": 1}))
    lines = (tmp_path / "report" / SERIES_FILE).read_text().splitlines()
    assert len(lines) <= 1 + MOST_READINGS + MOST_EVENTS
    assert keeper._series.dropped_events


@pytest.mark.parametrize(
    "text", ["", "no json\nx\n", '{"about": {}}\n', '{"about": {"started": 1}}\n{"at": 1}\n{"at": 2}\n', "[]\n[]\n"]
)  # fmt: skip
def test_files_of_other_kinds_are_refused_by_name(tmp_path: Path, text: str):
    (tmp_path / SERIES_FILE).write_text(text)
    with pytest.raises(InputError, match="does not contain the readings of a run"):
        rundata.find(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["x", "{}", '{"sums": {"count": "x"}}', '{"sums": {"count": 1, "squares": 0}, "buckets": [1]}']
)
def test_broken_times_are_refused_by_name(tmp_path: Path, text: str):
    (tmp_path / SERIES_FILE).write_text(json.dumps({"about": {"name": "x", "started": 1.0}}) + "\n")
    (tmp_path / "times.json").write_text(text)
    with pytest.raises(InputError, match=r"times\.json contains no times"):
        rundata.find(str(tmp_path))


def test_newest_run_of_a_record_is_shown(tmp_path: Path):
    for start, name in ((5, "first"), (40, "second"), (300, "third")):
        folder = tmp_path / "report" / f"{start}-1"
        folder.mkdir(parents=True)
        about = {"about": {"name": name, "started": 1.0}}
        (folder / SERIES_FILE).write_text(json.dumps(about) + "\n")
    data = rundata.find(str(tmp_path))
    assert (data.name, data.earlier) == ("third", 2)
    assert "2 earlier runs" in Page(render(data)).words


# The command


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (None, "you have no live run. A report on a run that has ended"),
        ("no-such-run", "neither a folder nor the name of a live run. A report on a run that has ended"),
        (".", "contains nothing to report"),
    ],
)
def test_run_that_cannot_be_found_is_explained(
    which: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rundata, "live_runs", lambda folder=None: [])
    with pytest.raises(InputError, match=said):
        command.report(which, tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_missing_library_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [
        name for name in sys.modules if name.startswith(("matplotlib", "dataloaderjob.local.reporting.p"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "dataloaderjob.local.reporting.charts")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        InputError, match=r"requires the module 'matplotlib': pip install 'dataloaderjob\[report\]'"
    ):
        command.report(None, tmp_path / "out.html")


@pytest.mark.parametrize(("name", "said"), [("", "is a folder"), ("missing/x.html", "cannot be written")])
def test_file_that_cannot_be_written_is_explained(tmp_path: Path, name: str, said: str):
    (tmp_path / SERIES_FILE).write_text(json.dumps({"about": {"name": "x", "started": 1.0}}) + "\n")
    with pytest.raises(InputError, match=said):
        command.report(str(tmp_path), tmp_path / name)
    assert not list(tmp_path.glob(".report-*"))


def test_unused_series_module_is_pure():
    assert not {"socket", "threading", "time", "os"} & set(vars(series))


def test_wait_for_one_batch_fills_all_the_time_that_it_took():
    def at(seconds: float, calls: int, wait_s: float, step_s: float, ready: int = 0) -> Reading:
        rank = RankReading(calls, int(wait_s * 1e9), int(step_s * 1e9), 0, ready)
        return Reading(at=seconds, ranks={"0": rank})

    readings = [
        at(0, 10, 0.0, 1.0), at(1, 20, 0.1, 1.9), at(2, 20, 0.1, 1.9, 9), at(3, 20, 0.1, 1.9, 9), at(4, 22, 2.9, 2.1),
        at(5, 22, 2.9, 2.1), at(6, 23, 3.0, 4.0), at(7, 23, 3.0, 4.0),
    ]  # fmt: skip
    spans = Analysis(RunData({"started": 0.0}, Series(readings), Times())).spans
    assert [span.waiting.get("0") for span in spans] == pytest.approx(
        [0.1, 1.0, 1.0, 0.8, 0.0, 0.1, None], abs=0.01
    )


def test_waiting_for_the_first_batch_is_told_apart():
    readings = [reading(0.0, 0)]
    for at in range(20, 60):
        counts = {"next_calls": at, "wait_ns": 20 * 10**9, "step_ns": (at - 19) * 10**9}
        readings.append(reading(float(at), at, counts=counts))
    found = Analysis(RunData({"started": 0.0}, Series(readings), times()))
    assert found.waiting == 0.0
    assert found.pipeline is not None
    assert found.pipeline.waiting == pytest.approx(0.0)
    assert found.first_batch_at == 20.0
