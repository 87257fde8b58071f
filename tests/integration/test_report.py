"""Reports of real runs: a lost feeder and slow samples are told by name, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from feeder_client import wait_until
from local_runs import LocalRun, Project

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.timings import TIMES
from dataloaderjob.local.reporting import rundata
from dataloaderjob.local.reporting.analysis import Analysis
from dataloaderjob.local.reporting.page import render
from dataloaderjob.local.reporting.series import LOST, REPLACED, STARTED

SLOW_DATA = """
import time
import torch

class Numbers(torch.utils.data.Dataset):
    def __init__(self, length, seconds=0.0):
        self.length, self.seconds = length, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        time.sleep(1.5 if i in (17, 123) else self.seconds)
        return torch.full((64,), float(i)), i
"""
SCRIPT = """
import time, torch
from dataloaderjob import DataLoader

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        time.sleep(0.3 if i == 42 else 0.001)
        return i

if __name__ == "__main__":
    for batch in DataLoader(Rows(), batch_size=4, num_workers=2):
        time.sleep(0.01)
"""


KUBECTL = """#!{python}
import json, os, sys
if sys.argv[1] == "get":
    sys.stdout.write(open({pods!r}).read())
else:
    assert sys.argv[1:6] == ["exec", "-n", "team", "small-1", "-c"], sys.argv
    folder = {{"feeder": ["--folder", {times!r}], "supervisor": []}}[sys.argv[6]]
    os.execv({python!r}, [{python!r}, *sys.argv[9:], *folder])
"""
"""A kubectl for a cluster whose pods are processes of this machine."""


def report(*args: str, cwd: Path, path: str = "") -> str:
    words = [sys.executable, "-m", "dataloaderjob.local.cli", "report", *args]
    env = {**os.environ, "PATH": os.pathsep.join(filter(None, [path, os.environ["PATH"]]))}
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cluster_of(folder: Path, run: LocalRun) -> str:
    """Writes a kubectl, for whom the run's supervisor is in a pod. Returns the folder for PATH."""
    settings, pods, kubectl = folder / "head.json", folder / "pods.json", folder / "kubectl"
    about = run.find()
    made = {"job": about["job"], "key_path": str(run.home / "key"), "supervisor_port": about["port"]}
    settings.write_text(json.dumps(made))
    command = ["python", "-P", "-m", "dataloaderjob.pod.supervisor", "--settings", str(settings)]
    listed = {
        "metadata": {"name": "small-1"},
        "spec": {"containers": [{"name": "head"}, {"name": "supervisor", "command": command}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    pods.write_text(json.dumps({"items": [{**listed, "status": {}}, listed]}))
    kubectl.write_text(KUBECTL.format(python=sys.executable, pods=str(pods), times=str(run.home / TIMES)))
    kubectl.chmod(0o755)
    return str(folder)


def text_of(page: str) -> str:
    """What a reader sees outside of charts."""
    page = re.sub(r"<style.*?</style>|<svg.*?</svg>", "", page, flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def started(record: Path, feeder: str) -> str:
    """What a live run's report tells of this feeder's start; empty before that."""
    try:
        events = rundata.find(str(record)).series.events
    except InputError:
        return ""
    return next((e.what for e in events if e.who == feeder and e.kind == STARTED), "")


@pytest.mark.thorough
def test_report_of_a_run_names_the_killed_feeder_and_its_replacement(tmp_path: Path):
    project = Project(tmp_path, 4000, 0.004, feeders=2)
    with LocalRun(project.path, "--provider", "local", "--record", str(tmp_path / "record")) as run:
        told = wait_until(lambda: started(tmp_path / "record", "feeder-1"), 60, "feeder-1 serves")
        run.find()
        assert rundata.find(str(run.home)).is_live
        os.kill(int(re.findall(r"\d+", told)[0]), signal.SIGKILL)
        assert run.end() == 0
        assert run.left() == []
    found = Analysis(rundata.find(str(tmp_path / "record")))
    assert [e.kind for e in found.data.series.events if e.kind in (LOST, REPLACED)]
    assert found.incidents[0].back_s is not None
    assert found.batches == 400
    assert found.times.sums.count >= 400
    shown = text_of(render(found.data))
    assert re.search(r"\[1\] At [\d.]+ s feeder-1 was lost: .*SIGKILL", shown)
    assert "Another process replaced it" in shown
    assert {"rank 0", "sidecar", "feeder-0", "feeder-0, batches"} <= set(found.last.cpu)


def test_report_names_slow_samples_by_index(tmp_path: Path):
    project = Project(tmp_path, 400, 0.001, feeders=1)  # with two, a late batch may be made twice
    (tmp_path / "data.py").write_text(SLOW_DATA)
    with LocalRun(project.path, "--provider", "local", "--record", str(tmp_path / "record")) as run:
        assert run.end() == 0
    report("record", cwd=tmp_path)
    found = Analysis(rundata.find(str(tmp_path / "record")))
    slow = found.times.samples[:2]
    assert {entry.text for entry in slow} == {"index 17", "index 123"}
    assert all(1.5 <= entry.took_ns / 1e9 < 10 for entry in slow)
    assert {entry.text for entry in found.times.batches[:2]} == {"index 17", "index 123"}
    assert "index 123" in text_of((tmp_path / "report.html").read_text())
    sums = found.times.sums
    assert sums.nbytes == found.nbytes
    assert sums.fetch_ns + sums.collate_ns + sums.encode_ns == sums.wall_ns


@pytest.mark.thorough
def test_script_by_itself_keeps_what_a_report_needs_in_its_record(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {**os.environ, "DATALOADERJOB_RECORD": "record"}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, check=True)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # the service ends a little later than its script
        found = Analysis(rundata.find(str(tmp_path / "record")))
        if found.batches == 100 and found.times.sums.count == 100:
            break
        time.sleep(0.2)
    assert found.batches == 100
    assert found.times.samples[0].text == "index 42"
    assert "train.py" in render(found.data)


def test_report_of_a_job_on_a_cluster_shows_what_a_watch_of_it_saw(tmp_path: Path):
    project = Project(tmp_path, 40_000, 0.004, feeders=2)
    with LocalRun(project.path, "--provider", "local") as run:
        run.until("feeders 2/2")
        path = cluster_of(tmp_path, run)
        said = report("-n", "team", "small", "--seconds", "12", cwd=tmp_path, path=path)
    assert said.startswith("report.html: report of team/small")
    shown = text_of((tmp_path / "report.html").read_text())
    assert re.search(r"A job on a cluster, watched for 1[123] s", shown)
    assert re.search(r"Limited by input: training waited for input for (9\d|100)%", shown)
    assert "verdict on its last minute: training waits for input" in shown
    assert re.search(r"Feeders made \d[\d,]+ batches during the watch", shown)
    assert re.search(
        r"The slowest samples took sample batch at [\d.]+ ms index \d+ \d+ \d\d:\d\d:\d\d", shown
    )
    assert re.search(r"feeder-1, making batches [\d.]+ s", shown)
    assert re.search(r"rank batches waited .* 0 \d\d+ (9\d|100)%", shown)


@pytest.mark.parametrize(
    ("args", "kubectl", "said"),
    [
        (["-n", "team"], "", "--namespace requires the name of a job"),
        (["-n", "team", "x", "--seconds", "2"], "", "--seconds must be between 5 and 3600, got 2"),
        (["-n", "team", "x"], "echo 'Forbidden' >&2; exit 1", "kubectl get failed: Forbidden"),
        (["-n", "team", "x"], "echo '{\"items\": []}'", "found no ready head pod for DataLoaderJob x in namespace"),
        (["-n", "team", "x"], None, "requires kubectl, which was not found"),
    ],
    ids=["no name", "too short", "refused", "no job", "no kubectl"],
)  # fmt: skip
def test_watch_that_cannot_begin_says_why(tmp_path: Path, args: list[str], kubectl: str | None, said: str):
    if kubectl is not None:
        (tmp_path / "kubectl").write_text(f"#!/bin/sh\n{kubectl}\n")
        (tmp_path / "kubectl").chmod(0o755)
    words = [sys.executable, "-m", "dataloaderjob.local.cli", "report", *args]
    env = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "report.html").exists()
