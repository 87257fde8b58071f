"""Ten scripts whose limit is known, while they run on feeders: the verdict, and its prediction for twice the feeders.

The verdict is that of `dataloaderjob status`, a few seconds before the script ends. The rates are measured by its loop.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import links
from bench.model.real import come_first
from bench.model.scripts import DATASETS, MEASURED_LOOP
from dataloaderjob.core import measures
from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.input_bound import judge, predicted
from dataloaderjob.core.measures import Measures
from dataloaderjob.core.places import FEEDERS_VARIABLE, KEEP_VARIABLE, RECORD_VARIABLE, SOCKET_VARIABLE
from dataloaderjob.local import reaper
from dataloaderjob.local.status import LiveRun, live_runs

SECONDS, SKIPPED = 9.0, 10
"""Length of a run; first batches that do not count."""
LOOK_S = 0.5
START_S = 60.0
SCRIPT = (
    """
import sys, time
import torch
from torch.utils.data import Dataset, IterableDataset
from dataloaderjob import DataLoader

LENGTH = 10**7
"""
    + DATASETS
    + """
class Large(Decode):
    ready = None
    def __getitem__(self, i):
        if self.ready is None:
            self.ready = torch.ones(4_000_000)
        return self.ready

class Bytes(Decode):
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.ones(500_000)

class Tiny(Decode):
    def __getitem__(self, i):
        work(0.0013)
        time.sleep(0.0007)
        return torch.zeros(1)

def only(samples):
    return samples[0]

KINDS = {
    # kind: dataset, batch size, step in seconds, collate_fn
    "decode": (Decode, 8, 0.004, None), "storage": (Storage, 8, 0.004, None), "collate": (Quick, 8, 0.004, collate),
    "network": (Bytes, 4, 0.004, None), "receiver": (Large, 1, 0.0, only), "trainer": (Decode, 8, 0.05, None),
    "tail": (Tail, 8, 0.004, None), "tiny": (Tiny, 1, 0.0002, None), "stream": (Stream, 8, 0.004, None),
    "none": (Quick, 8, 0.02, None),
}

if __name__ == "__main__":
    kind, workers, window, seconds, skipped = sys.argv[1], *map(int, sys.argv[2:])
    made, size, step_s, collate_fn = KINDS[kind]
    loader = DataLoader(made(), batch_size=size, num_workers=workers, prefetch_factor=window // workers,
                        collate_fn=collate_fn)
"""
    + MEASURED_LOOP
)
WINDOW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A script, and the word of the verdict on it."""

    kind: str
    what: str
    word: str
    feeders: int = 1
    slots: int | None = None
    """`num_workers` of an iterable dataset, which stays the same with twice the feeders."""
    also: tuple[str, ...] = ()
    """Words that are right as well on a machine with fewer CPUs than processes, because all of these are busy then."""
    gbit: float = 0.0
    """Rate of the link between the feeders' network namespace and the trainer's; 0: one machine."""


RUNNING = (
    Running(kind="decode", what="CPU in `__getitem__`", word="feeders"),
    Running(kind="storage", what="`__getitem__` waits for data", word="storage"),
    Running(kind="collate", what="CPU in `collate_fn`", word="feeders"),
    Running(
        kind="network",
        what="8 MB for each batch, over a link of 0.5 Gbit/s",
        word="network",
        feeders=2,
        gbit=0.5,
    ),
    Running(
        kind="receiver",
        what="16 MB for each batch, ready in memory",
        word="receiver",
        feeders=3,
        also=("feeders", "network"),
    ),
    Running(kind="trainer", what="a step longer than a batch takes", word="ok"),
    Running(kind="tail", what="every fourth batch takes six times as long", word="feeders"),
    Running(kind="tiny", what="batches of one small sample", word="feeders"),
    Running(kind="stream", what="an iterable dataset with two slots", word="slots", feeders=2, slots=2),
    Running(kind="none", what="samples that cost nothing", word="ok"),
)


@dataclass(frozen=True, slots=True)
class _Found:
    rate: float
    measures: Measures


def row(one: Running) -> dict[str, object]:
    """Runs the script with its feeders, and with twice as many, before other work of this machine if that is allowed.

    Raises NotImplementedError if a link is needed and this process may not make one.
    """
    now, then = _run(one, one.feeders), _run(one, 2 * one.feeders)
    verdict = judge(now.measures)
    if verdict is None:
        raise RuntimeError(f"{one.kind}: too few batches")
    expected = predicted(now.measures, 2 * one.feeders)
    processes = one.feeders + 2  # with the trainer and its receiver
    right = {one.word, *(one.also if (os.cpu_count() or 1) < processes else ())}
    return {
        "what": one.what, "feeders": one.feeders, "word": verdict.word, "is_right": verdict.word in right,
        "input_bound": verdict.waiting, "recommended": verdict.feeders, "rate": now.rate, "rate_twice": then.rate,
        "predicted": expected, "error": abs(expected / then.rate - 1),
    }  # fmt: skip


def _run(one: Running, feeders: int) -> _Found:
    with tempfile.TemporaryDirectory(prefix="dlj-model-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        workers = one.slots or feeders
        words = (one.kind, workers, max(WINDOW, 2 * feeders), int(SECONDS), SKIPPED)
        env = {
            **os.environ,
            RECORD_VARIABLE: str(folder / "record"),
            KEEP_VARIABLE: "",
            FEEDERS_VARIABLE: str(feeders),
        }
        with contextlib.ExitStack() as stack:
            if one.gbit:
                env[SOCKET_VARIABLE] = stack.enter_context(_apart(folder, feeders, one.gbit))
            running = subprocess.Popen(
                [sys.executable, str(script), *map(str, words)], env=env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            last = None
            while running.poll() is None:
                for run in _of(folder):
                    come_first([running.pid, *reaper.tagged(str(run.about["run"]))])
                    last = _measures(run) or last
                time.sleep(LOOK_S)
            out, errors = running.communicate()
    if running.returncode or last is None:
        raise RuntimeError(f"{one.kind}: {errors or 'no measures'}")
    return _Found(float(out.rpartition("rate ")[2]), last)


def _of(folder: Path) -> list[LiveRun]:
    return [run for run in live_runs() if str(run.about.get("report", "")).startswith(str(folder))]


def _measures(run: LiveRun) -> Measures | None:
    try:
        return measures.parse(run.ask({"type": "status"}).get("measures"))
    except (OSError, DataLoaderJobError):  # it starts or ends
        return None


@contextlib.contextmanager
def _apart(folder: Path, feeders: int, gbit: float) -> Iterator[str]:
    """Yields the socket of a service whose feeders are in a network namespace behind a link of that rate."""
    with links.link(gbit) as namespace:
        words = [sys.executable, "-m", "bench.model.shaped", str(folder), str(feeders), namespace]
        service = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            deadline = time.monotonic() + START_S
            while not any(run.ask({"type": "status"}).get("ready") == feeders for run in _listening(folder)):
                if service.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the service behind the link does not start")
                time.sleep(0.1)
            yield str(folder / "s")
        finally:
            service.terminate()
            service.wait()


def _listening(folder: Path) -> list[LiveRun]:
    found = []
    for run in _of(folder):
        with contextlib.suppress(OSError, DataLoaderJobError):
            run.ask({"type": "status"})
            found.append(run)
    return found
