"""A job that streams for a while and prints a digest of all its batches, and the same on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime
from itertools import pairwise

from cluster import Manifest
from jobs import DIGEST, TRAINER, Job, changed, job

_PROGRAM = """
import hashlib, os, signal, time, torch
import torch.distributed as dist
from dataloaderjob import DataLoader
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
class Set(torch.utils.data.Dataset):
    pace_s = {pace_s}
    def __len__(self): return {samples}
    def __getitem__(self, i):
        time.sleep(self.pace_s)
        return i, torch.rand(3)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("gloo")
    dist.barrier()
torch.manual_seed(0)
seen = b""
for number, (indices, noise) in enumerate(DataLoader(Set(), 4, shuffle=True, num_workers={workers}), 1):
    seen = hashlib.sha256(seen + indices.numpy().tobytes() + noise.numpy().tobytes()).digest()
    print("batch", number, flush=True)
print("digest", seen.hex()[:16], flush=True)
"""
SAMPLES = 240
PACE_S = 0.25
"""Of each sample: a minute in all for one feeder."""


def stream(name: str, *, samples: int = SAMPLES, pace_s: float = PACE_S, **paths: object) -> Manifest:
    """The manifest. More than one trainer also meet by gloo. `paths`: of `changed`."""
    made = job(name, program=_PROGRAM.format(samples=samples, pace_s=pace_s, workers=None))
    return changed(made, spec__trainers__job__template__spec__terminationGracePeriodSeconds=5, **paths)


def stream_here(samples: int = SAMPLES) -> str:
    """The digest that the same program prints in one process of this machine."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = _PROGRAM.format(samples=samples, pace_s=0.0, workers=0)
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return DIGEST.findall(done.stdout)[-1]


def takes_batches(of: Job, number: int = 5) -> bool:
    """Whether a trainer of the present attempt has had so many batches."""
    return f"batch {number}\n" in of.logs(TRAINER, "trainer")


def longest_gap_s(of: Job, begin: datetime, end: datetime) -> float:
    """The longest time in which the one trainer of a job, which tells its batches, has printed nothing, between two
    moments of this machine's clock, which is the nodes' too."""
    (pod,) = of.pods(TRAINER)
    log = of.cluster.logs(pod["metadata"]["name"], of.namespace, "trainer", "--timestamps")
    return longest_silence_s(log, begin, end)


def longest_silence_s(log: str, begin: datetime, end: datetime) -> float:
    """The longest time without a line of a log with timestamps, between two moments."""
    times = (datetime.fromisoformat(line.split()[0]) for line in log.splitlines())
    within = [begin, *(moment for moment in times if begin < moment < end), end]
    return max((later - earlier).total_seconds() for earlier, later in pairwise(within))
