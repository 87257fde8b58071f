"""Real pipelines: scripts on this machine's feeders, each with one number of feeders and with twice as many.

The first run's own data, as a report reads it, is the model's input. The second run's rate is measured by its loop.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.model.scripts import MEASURED_LOOP, WORK
from dataloaderjob.core.places import KEEP_VARIABLE, RECORD_VARIABLE
from dataloaderjob.core.sizing import rate
from dataloaderjob.local import reaper
from dataloaderjob.local.reporting import rundata
from dataloaderjob.local.reporting.analysis import Analysis
from dataloaderjob.local.status import live_runs

SECONDS, SKIPPED = 6.0, 10
"""Length of a run; first batches that do not count."""
SCRIPT = f"""
import random, sys, time
import torch
from dataloaderjob import DataLoader
{WORK}
class Data(torch.utils.data.Dataset):
    def __init__(self, sleep_s, cpu_s, kind, floats):
        self.sleep_s, self.cpu_s, self.kind, self.floats = sleep_s, cpu_s, kind, floats
    def __len__(self):
        return 10**6
    def __getitem__(self, i):
        factor = 1.0
        if self.kind == "heavy tail":
            factor = 12.0 if i % 40 == 0 else 0.7
        elif self.kind == "varied":
            factor = random.lognormvariate(-0.125, 0.5)
        work(self.cpu_s * factor)
        time.sleep(self.sleep_s * factor)
        return torch.zeros(self.floats)

def collate(samples):
    time.sleep(0.02)
    return torch.stack(samples)

if __name__ == "__main__":
    sleep_s, cpu_s, step_s = map(float, sys.argv[1:4])
    kind, floats, size, feeders, seconds, skipped = sys.argv[4], *map(float, sys.argv[5:])
    loader = DataLoader(Data(sleep_s, cpu_s, kind, int(floats)), int(size), num_workers=int(feeders),
                        prefetch_factor=16 // int(feeders), shuffle=True,
                        collate_fn=collate if kind == "collate" else None){MEASURED_LOOP}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """One pipeline. Times of a sample and of a step are in seconds."""

    name: str
    sleep_s: float
    cpu_s: float
    step_s: float
    feeders: int = 1
    kind: str = "even"
    floats: int = 1000
    size: int = 8


PIPELINES = (
    Real(name="waits, 1 feeder", sleep_s=0.004, cpu_s=0.0, step_s=0.004),
    Real(name="waits, 2 feeders", sleep_s=0.006, cpu_s=0.0, step_s=0.004, feeders=2),
    Real(name="works", sleep_s=0.0, cpu_s=0.004, step_s=0.004),
    Real(name="works and waits", sleep_s=0.003, cpu_s=0.001, step_s=0.004),
    Real(name="batches that differ", sleep_s=0.005, cpu_s=0.0002, step_s=0.004, feeders=2, kind="varied"),
    Real(name="heavy tail", sleep_s=0.004, cpu_s=0.0, step_s=0.004, feeders=2, kind="heavy tail"),
    Real(name="batches of 10 MB", sleep_s=0.01, cpu_s=0.0, step_s=0.005, floats=320_000),
    Real(name="batches of one sample", sleep_s=0.004, cpu_s=0.0, step_s=0.0005, size=1),
    Real(name="waits in collate_fn", sleep_s=0.001, cpu_s=0.0, step_s=0.004, kind="collate"),
    Real(name="training limits twice", sleep_s=0.004, cpu_s=0.0, step_s=0.022),
)


def row(one: Real) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="dlj-model-", ignore_cleanup_errors=True) as folder:
        now = _run(one, one.feeders, Path(folder) / "now")
        found = Analysis(rundata.find(f"{folder}/now"))
        if found.pipeline is None:
            raise RuntimeError(f"{one.name}: the run left no times of batches")
        # Both runs wait for CPUs of this machine; a report leaves that out, because feeders may run elsewhere.
        sums = found.times.sums
        pipeline = replace(found.pipeline, wall_s=sums.wall_ns / 1e9 / sums.count)
        then = _run(one, 2 * one.feeders, Path(folder) / "then")
    predicted = rate(pipeline, 2 * one.feeders)
    return {
        "name": one.name, "feeders": one.feeders, "ranks": 1, "rate": now, "rate_twice": then,
        "predicted": predicted, "error": abs(predicted / then - 1),
    }  # fmt: skip


def _run(one: Real, feeders: int, record: Path) -> float:
    """Returns the batches per second of a run."""
    script = record.with_suffix(".py")
    script.write_text(SCRIPT)
    words = (one.sleep_s, one.cpu_s, one.step_s, one.kind, one.floats, one.size, feeders, SECONDS, SKIPPED)
    env = {**os.environ, RECORD_VARIABLE: str(record), KEEP_VARIABLE: ""}
    running = subprocess.Popen(
        [sys.executable, str(script), *map(str, words)], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    while running.poll() is None:
        come_first(_pids(running.pid, record))
        time.sleep(0.5)
    out, errors = running.communicate()
    if running.returncode:
        raise RuntimeError(f"{one.name}: {errors}")
    return float(out.rpartition("rate ")[2])


def _pids(script: int, record: Path) -> Iterator[int]:
    """Yields the script's process, and those of its feeders and their service."""
    yield script
    for run in live_runs():
        if str(run.about.get("report", "")).startswith(str(record)):
            yield from reaper.tagged(str(run.about["run"]))


def come_first(pids: Iterable[int]) -> None:
    """Puts the processes' sessions before other work of this machine, which the model does not know, if allowed.

    Linux shares CPUs among sessions, so niceness counts only within a session.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text("-20")
