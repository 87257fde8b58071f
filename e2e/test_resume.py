"""A job that is suspended in the middle of an epoch goes on at the next batch, with another number of feeders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, until
from jobs import DIGEST, TRAINER, Job, job, with_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROGRAM = """
import hashlib, json, os, sys, time, torch
from dataloaderjob import DataLoader
class Set(torch.utils.data.Dataset):
    def __len__(self): return 200
    def __getitem__(self, i):
        time.sleep(float(os.environ.get("PACE", "0.08")))
        return i, torch.rand(3)
workers = os.environ.get("WORKERS")
torch.manual_seed(0)
loader = DataLoader(Set(), 4, shuffle=True, num_workers=workers and int(workers))
path, epoch, seen = os.environ["STATE"] + "/checkpoint", 0, ""
if os.path.exists(path):
    saved = json.load(open(path))
    epoch, seen = saved["epoch"], saved["seen"]
    loader.load_state_dict(saved["loader"])
    print("goes on after", saved["loader"]["batches"], flush=True)
while epoch < 2:
    for indices, noise in loader:
        content = indices.numpy().tobytes() + noise.numpy().tobytes()
        seen = hashlib.sha256(seen.encode() + content).hexdigest()
        with open(path + ".part", "w") as out:
            json.dump({"epoch": epoch, "seen": seen, "loader": loader.state_dict()}, out)
        os.replace(path + ".part", path)
        print("batch", loader.state_dict()["batches"], "of epoch", epoch, flush=True)
    epoch += 1
print("digest", seen[:16])
"""


def digest_here(folder: Path) -> str:
    """That of the same program in a process of this machine."""
    env = {**os.environ, "STATE": str(folder), "WORKERS": "0", "PACE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return DIGEST.findall(done.stdout)[-1]


def test_job_suspended_in_mid_epoch_resumes_with_the_same_digest(
    operator: Cluster, namespace: str, start, tmp_path: Path
):
    resumed: Job = start(with_state(operator, namespace, job("resumed", program=PROGRAM)))
    until(
        lambda: "batch 20 of epoch 0" in resumed.logs(TRAINER, "trainer"),
        timeout_s=150, what="batch 20", also=resumed.why,
    )  # fmt: skip
    operator.patch("dlj", "resumed", namespace, {"spec": {"suspend": True}})
    resumed.await_phase("Suspended", timeout_s=90)
    operator.patch("dlj", "resumed", namespace, {"spec": {"suspend": False, "feeders": {"replicas": 2}}})
    resumed.await_phase("Complete", timeout_s=240)
    log = resumed.logs(TRAINER, "trainer")
    assert "goes on after" in log
    assert "batch 1 of epoch 0" not in log
    assert resumed.digest() == digest_here(tmp_path)
