"""Ten scripts whose limit is known, under `dataloaderjob advise`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.model.real import come_first
from bench.model.scripts import DATASETS

SCRIPT = (
    """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

LENGTH = 100_000
"""
    + DATASETS
    + """
class Large(Decode):
    def __getitem__(self, i):
        return torch.ones(500_000)

class Tiny(Decode):
    def __getitem__(self, i):
        work(0.0004)
        return torch.zeros(1)

KINDS = {
    # kind: dataset, workers, batch size, step in seconds
    "decode": (Decode, 1, 8, 0.004), "storage": (Storage, 1, 8, 0.004), "collate": (Quick, 1, 8, 0.004),
    "network": (Large, 1, 8, 0.001), "receiver": (Large, 1, 8, 0.001), "trainer": (Decode, 1, 8, 0.05),
    "tail": (Tail, 1, 8, 0.004), "tiny": (Tiny, 1, 1, 0.0002), "stream": (Stream, 2, 8, 0.004),
    "none": (Quick, 0, 8, 0.02),
}

if __name__ == "__main__":
    made, workers, size, step_s = KINDS[sys.argv[1]]
    loader = DataLoader(made(), batch_size=size, num_workers=workers,
                        collate_fn=collate if sys.argv[1] == "collate" else None)
    for batch in loader:
        time.sleep(step_s)
"""
)


@dataclass(frozen=True, slots=True)
class Known:
    """A script and its limits: today's, and the one that remains. Words that are all right are separated by `or`."""

    kind: str
    what: str
    limit: str
    next_limit: str
    options: tuple[str, ...] = ()

    def is_right(self, found: dict[str, Any]) -> bool:
        return found["limit"] in self.limit.split(" or ") and found["next_limit"] in self.next_limit.split(
            " or "
        )


KNOWN = (
    Known("decode", "CPU in `__getitem__`, one worker", "cpu", "trainer"),
    Known("storage", "`__getitem__` waits for data, one worker", "storage", "trainer"),
    Known("collate", "CPU in `collate_fn`, one worker", "cpu", "trainer"),
    Known("network", "16 MB for each batch, `--link 5`", "cpu or network", "network", ("--link", "5")),
    Known("receiver", "16 MB for each batch, no limit of the link", "cpu", "receiver"),
    Known("trainer", "a step longer than a batch takes", "trainer", "trainer"),
    Known("tail", "every fourth batch takes six times as long, one worker", "cpu", "trainer"),
    Known("tiny", "batches of one small sample, one worker", "cpu", "trainer or receiver"),
    Known("stream", "an iterable dataset with two slots", "cpu or slots", "slots"),
    Known("none", "samples that cost nothing", "trainer", "trainer"),
)


def advise(one: Known, *, first: bool = True) -> dict[str, Any]:
    """Returns what `advise --json` prints. `first`: the script comes before other work of this machine."""
    with tempfile.TemporaryDirectory(prefix="dlj-model-", ignore_cleanup_errors=True) as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        program = Path(sys.executable).parent / "dataloaderjob"
        command = [
            str(program),
            "advise",
            "--json",
            *one.options,
            "--",
            sys.executable,
            str(script),
            one.kind,
        ]
        running = subprocess.Popen(
            command,
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        while first and running.poll() is None:
            with contextlib.suppress(psutil.Error):
                come_first([running.pid, *(one.pid for one in psutil.Process(running.pid).children(True))])
            time.sleep(0.5)
        out, errors = running.communicate()
    if running.returncode:
        raise RuntimeError(f"{one.kind}: {errors}")
    return dict(json.loads(out))


def row(one: Known) -> dict[str, object]:
    found = advise(one)
    return {
        "what": one.what, "limit": found["limit"], "next_limit": found["next_limit"], "is_right": one.is_right(found),
        "input_bound": found["input_bound"], "gain": found["gain"], "feeders": found["feeders"],
    }  # fmt: skip
