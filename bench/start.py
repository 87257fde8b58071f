"""B7: time to the first batch, cold and warm, and the gap between epochs.

- Cold: from the start of the process (recorded by the harness in BENCH_STARTED, Unix seconds) to the first batch,
  imports and service included.
- Warm: from `iter()` of a second loader in the same process.
- Gap: from the last batch of an epoch to the first of the next one, same loader, over a few short epochs.
- Later: like warm, PAUSE_S after all loaders of the process are gone.
- Next script: like cold, for a script that starts after another one of the same environment has ended.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.stats import median
from bench.work import Proof, sums

STARTED = "BENCH_STARTED"
SIDE = 128
PAUSE_S = 5.0
"""A pause that is longer than a service without clients waits for another rank."""


@dataclass(frozen=True, slots=True)
class Case:
    producers: int = 2
    batch: int = 32
    batches: int = 12
    epochs: int = 3
    persistent: bool = False
    """True if workers, or feeders with their datasets, are kept from one epoch to the next."""
    began: float = 0.0
    """Start of the process, Unix seconds; 0: as given by the environment."""
    follows: bool = False
    """True if the second of two scripts is measured."""
    smoke: bool = False

    @property
    def name(self) -> str:
        how = ", persistent" if self.persistent else ", next script" if self.follows else ""
        return f"{self.producers} producers{how}"


class Small(torch.utils.data.Dataset[Any]):
    """uint8 pictures of 3 x 128 x 128 that contain their index: batches of 1.6 MB for next to no CPU."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return self.case.batch * self.case.batches

    def picture(self, index: int) -> np.ndarray:
        return np.full((3, SIDE, SIDE), index % 251, dtype=np.uint8)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.picture(index))

    def stacked(self, number: int) -> np.ndarray:
        """Returns batch `number`, uint8 of shape (batch, 3, 128, 128)."""
        return np.stack(
            [self.picture(i) for i in range(number * self.case.batch, (number + 1) * self.case.batch)]
        )


def measure(new_loader: Callable[[], Iterable[Any]], case: Case) -> dict[str, Any]:
    """Returns the figures. `new_loader` makes a loader that can be iterated repeatedly."""
    dataset, proof = Small(case), Proof()
    expected = [[sums(dataset.stacked(i))] for i in range(case.batches)]
    loader = new_loader()
    cold_s, gaps, last = 0.0, [], 0.0
    for epoch in range(2 if case.smoke else case.epochs):
        for number, batch in enumerate(loader):
            now = time.time()
            if number == 0 and epoch == 0:
                cold_s = now - (case.began or float(os.environ[STARTED]))
            elif number == 0:
                gaps.append(now - last)
            proof.add(number, [np.asarray(batch)], expected[number])
            last = time.time()
        if number != case.batches - 1:
            raise RuntimeError(f"an epoch has {case.batches} batches, found {number + 1}")
    again = new_loader()
    start = time.time()
    batch = next(iter(again))
    warm_s = time.time() - start
    proof.add(0, [np.asarray(batch)], expected[0])
    figures = {"cold_s": cold_s, "warm_s": warm_s, "gap_ms": 1e3 * median(gaps)}
    if not case.smoke:
        del loader, again
        gc.collect()
        time.sleep(PAUSE_S)
        start = time.time()
        batch = next(iter(new_loader()))
        figures["later_s"] = time.time() - start
        proof.add(0, [np.asarray(batch)], expected[0])
    return {"figures": {case.name: figures}, "proof": proof.as_json()}


def measure_next_script(party: str, case: Case) -> dict[str, Any]:
    """Runs two scripts of this party one after the other, and returns the figures of the second."""
    plain = {**asdict(case), "follows": False, "smoke": True}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for _ in range(2):
            spec = {"benchmark": "B7", "party": party, "case": {**plain, "began": time.time()}}
            subprocess.run([sys.executable, "-m", "bench.cell", json.dumps(spec), str(out)], check=True)
        found = json.loads(out.read_text())
    (figures,) = found["figures"].values()
    return {"figures": {case.name: {"cold_s": figures["cold_s"]}}, "proof": found["proof"]}
