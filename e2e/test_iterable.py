"""A stream on a cluster: two ranks, two pods of feeders of which one is killed, and a run that is gone on with from the
state of one rank. torch's own workers, undisturbed, are the reference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cluster import Cluster, until
from jobs import DIGEST, FEEDERS, TRAINER, Job, job, with_state

pytestmark = pytest.mark.timeout(900)
PROGRAM = """
import hashlib, json, os, time, torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
reference = "REFERENCE" in os.environ
if reference:
    from torch.utils.data import DataLoader
else:
    from dataloaderjob import DataLoader
    dist.init_process_group("gloo")
class Shards(IterableDataset):
    lengths = [90, 130, 60, 160, 50, 150, 80, 120]  # each rank has as many batches
    def __iter__(self):
        info, rank, world = get_worker_info(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for shard in range(rank * info.num_workers + info.id, len(self.lengths), world * info.num_workers):
            for number in range(self.lengths[shard]):
                time.sleep(0 if reference else 0.1)
                yield shard * 1000 + number, torch.rand(3)
torch.manual_seed(0)
loader = DataLoader(Shards(), 4, num_workers=2)
folder, rank = os.environ["STATE"], os.environ["RANK"]
first, seen = 0, {0: ""}
if os.path.exists(folder + "/loader"):
    state = json.load(open(folder + "/loader"))  # of rank 0, for both
    loader.load_state_dict(state)
    first = state["batches"]
    seen = {first: json.load(open(folder + "/" + rank))[str(first)]}
    print("goes on after", first, flush=True)
def write(name, what):
    with open(folder + "/." + name, "w") as out:
        json.dump(what, out)
    os.replace(folder + "/." + name, folder + "/" + name)
for number, (indices, noise) in enumerate(loader, first + 1):
    content = indices.numpy().tobytes() + noise.numpy().tobytes()
    seen[number] = hashlib.sha256(seen[number - 1].encode() + content).hexdigest()
    if not reference:
        write(rank, seen)
        dist.barrier()
        if rank == "0":
            write("loader", loader.state_dict())
    print("batch", number, flush=True)
print("digest", seen[number][:16], flush=True)
"""


def digests_here() -> list[str]:
    """Those of both ranks, as torch's workers make them on this machine."""
    found = []
    for rank in "01":
        env = {**os.environ, "STATE": "/nowhere", "REFERENCE": "1", "RANK": rank, "WORLD_SIZE": "2"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120, check=True
        )
        found += DIGEST.findall(done.stdout)
    return found


def await_batch(of: Job, number: int) -> None:
    until(
        lambda: of.logs(TRAINER, "trainer").count(f"batch {number}\n") == 2,
        timeout_s=150, every_s=0.5, what=f"batch {number} of both ranks", also=of.why,
    )  # fmt: skip


@pytest.mark.slow
def test_stream_survives_a_lost_feeder_and_resumes_from_rank_0s_state(
    operator: Cluster, namespace: str, start
):
    streams: Job = start(
        with_state(operator, namespace, job("streams", program=PROGRAM, trainers=2, feeders=2))
    )
    await_batch(streams, 20)
    lost = str(streams.pods(FEEDERS)[-1]["metadata"]["name"])
    operator.kubectl("delete", "pod", lost, "-n", namespace, "--grace-period=0", "--force")
    await_batch(streams, 45)
    operator.patch("dlj", "streams", namespace, {"spec": {"suspend": True}})
    streams.await_phase("Suspended", timeout_s=90)
    operator.patch("dlj", "streams", namespace, {"spec": {"suspend": False}})
    streams.await_phase("Complete", timeout_s=300)
    log = streams.logs(TRAINER, "trainer")
    assert log.count("goes on after") == 2
    assert "batch 1\n" not in log
    assert DIGEST.findall(log) == digests_here()
