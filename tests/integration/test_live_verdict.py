"""The verdict on real runs: a script by itself, `dataloaderjob run`, and ten scripts whose limit is known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT
from local_runs import LocalRun, Project
from rig import until

from dataloaderjob.core import measures
from dataloaderjob.local import cli
from dataloaderjob.local.status import find_run

sys.path.insert(0, str(ROOT))
from bench.model import running
from bench.model.running import RUNNING, Running

SCRIPT = """
import time, torch
from dataloaderjob import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        time.sleep(0.02)
        return torch.zeros(8)

if __name__ == "__main__":
    for number, _ in enumerate(DataLoader(Slow(), batch_size=10, num_workers=1)):
        time.sleep(0.01)
        if number == {batches}:
            break
"""


@pytest.mark.thorough
@pytest.mark.parametrize("batches", [60, 4])
def test_a_script_that_waited_for_input_says_so_once_at_its_end(tmp_path: Path, batches: int):
    (tmp_path / "train.py").write_text(SCRIPT.format(batches=batches))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    said = [line for line in done.stderr.splitlines() if "waited for input" in line]
    if batches < 10:
        assert said == [], "a second of waiting is not worth a line"
        return
    assert len(said) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == said[0]
    assert "feeders mostly wait for data, so storage is the limit" in said[0]
    assert "instead of 1 would make it" in said[0]


@pytest.mark.thorough
def test_a_run_and_its_status_say_that_training_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    project = Project(tmp_path, 600, 0.03)
    with LocalRun(project.path, "--provider", "local") as run:
        run.until("ready after")
        run.find()
        live = find_run(str(run.home))

        def measured() -> measures.Measures | None:
            found = measures.parse(live.ask({"type": "status"}).get("measures"))
            return found if found and found.wall_s else None  # a batch's costs are known after two reports

        found = until(measured, 60, "its measures")
        assert found.wall_s == pytest.approx(0.3, rel=0.5)
        assert found.cpu_s < found.wall_s / 2
        assert found.waiting > 0.8
        assert cli.main(["status", "--dir", str(run.home)]) == 0
        assert "training waits for input for" in capsys.readouterr().out
        assert run.end() == 0, run.text
    assert "storage is the limit" in run.lines[-1]
    assert run.left() == []


def test_a_run_in_mode_auto_gets_the_feeders_that_training_needs(tmp_path: Path):
    project = Project(tmp_path, 100_000, 0.03)
    project.write(feeders={"replicas": 1, "autoscaling": {"mode": "Auto", "maxReplicas": 4}})
    with LocalRun(project.path, "--provider", "local") as run:
        run.until("ready after")
        assert "feeders 1 -> 4: training waits for" in run.until("feeders 1 -> ", 90)
        run.find()
        live = find_run(str(run.home))
        until(lambda: live.ask({"type": "status"}).get("ready") == 4, 60, "four feeders")


@pytest.mark.nightly
@pytest.mark.parametrize("one", RUNNING, ids=lambda one: one.kind)
def test_a_running_script_with_a_known_limit_gets_it_named(one: Running):
    try:
        found = running.row(one)  # before other work of this machine, if the user may do that
    except NotImplementedError as exc:
        pytest.skip(str(exc))
    assert found["is_right"], found
    assert float(str(found["error"])) <= 0.25, found
