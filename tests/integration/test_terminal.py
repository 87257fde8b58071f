"""`dataloaderjob run` and `status --watch` on a terminal: a table below the lines, and all sane afterwards."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import LocalRun, Project, digest
from terminal import OnTerminal

from dataloaderjob.local import reaper
from dataloaderjob.local.status import live_runs

LOUD = """
import os, sys, time
import torch
from dataloaderjob import DataLoader
from data import Numbers

rank = os.environ["RANK"]
print("\\x1b[31mred\\x1b[0m and \\x1b[2Aup", flush=True)
for number, (x, y) in enumerate(DataLoader(Numbers(int(sys.argv[1]), 0.001), batch_size=10)):
    print(f"batch {number} of rank {rank}", flush=True)
    if number == 5:
        for i in range(2000):
            print(f"flood {i} of rank {rank}", flush=True)
    time.sleep(0.05)
print("bye", file=sys.stderr, flush=True)
"""


@pytest.fixture
def loud(tmp_path: Path) -> Project:
    """Two ranks that print a lot, for five seconds and more."""
    project = Project(tmp_path, 1000, replicas=2, feeders=2)
    (tmp_path / "train.py").write_text(LOUD)
    return project


def has_table(text: str) -> bool:
    """Both feeders and both ranks are in the last lines."""
    return bool(
        re.search(
            r"small: feeders 2/2, [\d.-]+ batches/s.*\nfeeder +state +since +why *\n(feeder-\d +ready +\d+ s *\n){2}"
            r"rank +batches +batches/s +GB/s +stall +pool +ready *\n([01] +[1-9]\d* .*\n){2}",
            text,
        )
    )


@pytest.mark.thorough
def test_run_shows_a_table_below_the_ranks_output_and_removes_it(loud: Project):
    with OnTerminal("run", str(loud.path), "--provider", "local") as run:
        run.until(has_table)
        assert run.end() == 0, run.text
        assert run.is_sane()
    lines = run.screen.lines
    assert not [line for line in lines if re.match(r"small: feeders|feeder +state|rank +batches", line)], (
        run.text
    )
    for rank in range(2):
        own = [
            line.removeprefix(f"[trainer-{rank}] ") for line in lines if line.startswith(f"[trainer-{rank}] ")
        ]
        batches = [f"batch {n} of rank {rank}" for n in range(100)]
        flood = [f"flood {n} of rank {rank}" for n in range(2000)]
        assert own == ["red and up", *batches[:6], *flood, *batches[6:], "bye"], "no line is torn or missing"
    assert "\x1b[31mred\x1b[0m" in run.raw, "the ranks' colours stay"
    assert "\x1b[?" not in run.raw, "no mode of the terminal is changed"
    assert re.search(r"small: ended; 200 batches", run.text)
    assert run.raw.count("batches/s, ") < 1000, "a flood does not draw the table for each line"


@pytest.mark.thorough
def test_ctrl_c_in_a_run_leaves_the_terminal_sane(loud: Project):
    with OnTerminal("run", str(loud.path), "--provider", "local") as run:
        run.until(has_table)
        run.type("\x03")
        assert run.end(30) == 130, run.text
        assert run.is_sane()
    assert "received SIGINT: ending trainers and service" in run.text
    assert "small: was stopped; " in run.text
    assert not re.search(r"^feeder +state", run.text, re.MULTILINE), "the table is gone"


@pytest.mark.thorough
def test_closed_terminal_ends_the_run_and_leaves_nothing(loud: Project):
    with OnTerminal("run", str(loud.path), "--provider", "local") as run:
        run.until(has_table)
        (live,) = (found for found in live_runs() if found.about["pid"] == run.process.pid)
        run.hang_up()
        assert run.end(30) == 129
    assert not live.home.exists()
    assert reaper.tagged(live.about["run"]) == []


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": ""}])
@pytest.mark.quick("env0")
def test_a_terminal_that_cannot_be_drawn_on_gets_plain_lines(tmp_path: Path, env: dict[str, str]):
    project = Project(tmp_path, 100, 0.0)
    with OnTerminal("run", str(project.path), "--provider", "local", env=env) as run:
        assert run.end(60) == 0, run.text
    assert "\x1b" not in run.raw
    assert digest(run.screen.lines) == project.reference()


@pytest.mark.thorough
def test_watched_status_is_a_table_that_ends_with_the_run_or_ctrl_c(tmp_path: Path):
    project = Project(tmp_path, 100_000, 0.001, replicas=2, feeders=2)
    with LocalRun(project.path, "--provider", "local") as run:
        run.until("batch 20")
        run.find()
        words = ("status", "--watch", "--dir", str(run.home))
        with OnTerminal(*words) as watched:
            watched.until(has_table)
            watched.until(lambda text: re.search(r"\n0 +\d+ +[1-9][\d.]* ", text), 10)
            watched.type("\x03")
            assert watched.end(10) == 130, watched.text
            assert watched.is_sane()
        assert has_table(watched.text), "the last table stays"
        assert watched.text.count("small: feeders") == 1, "one table, drawn again in its place"
        with OnTerminal(*words, env={"NO_COLOR": "1"}) as watched:
            watched.until(has_table)
            assert not re.search(r"\x1b\[[\d;]*3\dm", watched.raw), "no colour"
            run.process.terminate()
            assert watched.end(60) == 0, watched.text
            assert watched.is_sane()
        assert "no run is left to watch" in watched.screen.lines[-2]
        assert run.end() == 143


@pytest.mark.slow
def test_piped_output_has_no_escape_codes(loud: Project):
    env = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "dataloaderjob.local.cli", "status", "--watch"]
    with LocalRun(loud.path, "--provider", "local", env=env) as run:
        run.until("ready after")
        run.find()
        watch = [*command, "--dir", str(run.home)]
        with subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watched:
            assert watched.stdout is not None
            first = watched.stdout.readline()
            assert first.startswith(f"small: {run.home}, pid ")
            assert run.end() == 0, run.text
            rest, _ = watched.communicate(timeout=60)
    ours = [line for line in run.lines if not line.startswith("[trainer-")]
    assert "\x1b" not in "".join(ours) + first + rest
    assert rest.splitlines()[-1] == "no run is left to watch"
    nothing = subprocess.run(
        [*command, "--dir", str(run.home)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (nothing.returncode, nothing.stdout) == (2, "")
