"""Ray Data and `dataloaderjob map` on a cluster, where a pod of feeders is killed."""

from __future__ import annotations

import json
import re

import pytest
from cluster import Cluster, until
from jobs import FEEDERS, TRAINER, Job, changed, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROWS = 1_200
PROGRAM = f"""
import json, os, socket, time, torch
import torch.distributed as dist
from dataloaderjob import DataLoader, RayData
dist.init_process_group("gloo")
torch.manual_seed(0)
def worked(batch):
    time.sleep(0.5)
    return {{"id": batch["id"], "host": [socket.gethostname()] * len(batch["id"])}}
def make():
    import ray
    print("slot of", socket.gethostname(), flush=True)
    return ray.data.range({ROWS}, override_num_blocks=40).map_batches(worked)
loader = DataLoader(RayData(make, batch_size=20), batch_size=None, num_workers=1, tail="drop")
seen, hosts = [], set()
for number, batch in enumerate(loader):
    seen.append(batch["id"].tolist())
    hosts.update(batch["host"])
    print("batch", number, flush=True)
    dist.barrier()
print("ids", json.dumps(seen), flush=True)
print("hosts", json.dumps(sorted(hosts)), flush=True)
"""


MAP = """
import pathlib, subprocess, sys
import pyarrow.parquet as pq
pathlib.Path("/tmp/score.py").write_text('''
import os, time, torch
class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 1200
    def __getitem__(self, i):
        time.sleep(0.02)
        return float(i)
points = Points()
def doubled(batch):
    return {"twice": batch * 2, "by": [os.environ["HOSTNAME"]] * len(batch)}
''')
words = ["dataloaderjob", "map", "/tmp/score.py", "points", "doubled", "--output", "/tmp/scores"]
done = subprocess.run([*words, "--batch-size", "10", "--rows-per-file", "100"])
rows = pq.read_table("/tmp/scores").to_pydict()
print("right", rows["index"] == list(range(1200)) and rows["twice"] == [2.0 * i for i in range(1200)])
print("pods", len(set(rows["by"])), flush=True)
sys.exit(done.returncode)
"""


def told(of: Job, word: str) -> list[list[list[int]]]:
    """What each rank printed after this word."""
    return [
        json.loads(found)
        for found in re.findall(rf"^{word} (.*)$", of.logs(TRAINER, "trainer"), re.MULTILINE)
    ]


@pytest.mark.alone  # on a busy machine its trainers may not come to agree on the pod that reads
def test_ray_data_feeds_two_trainers_and_survives_losing_the_reading_pod(
    operator: Cluster, namespace: str, start
):
    made = job("ray-data", program=PROGRAM, trainers=2, feeders=2)
    read: Job = start(changed(made, spec__ray__managed__tasks={"cpus": 1, "objectStore": "100Mi"}))
    until(
        lambda: read.logs(TRAINER, "trainer").count("batch 8\n") == 2,
        timeout_s=180, what="batch 8 of both ranks", also=read.why,
    )  # fmt: skip
    (lost,) = set(re.findall(r"slot of (\S+)", read.logs(FEEDERS)))
    operator.kubectl("delete", "pod", lost, "-n", namespace, "--grace-period=0", "--force")
    read.await_phase("Complete", timeout_s=300)
    ids = told(read, "ids")
    assert [i for step in zip(*ids, strict=True) for batch in step for i in batch] == list(range(ROWS))
    assert len({host for hosts in told(read, "hosts") for host in hosts}) >= 2


def test_map_uses_all_feeder_pods_and_survives_losing_one(operator: Cluster, namespace: str, start):
    mapped: Job = start(job("map", program=MAP, feeders=2))
    until(
        lambda: "rows" in mapped.logs(TRAINER, "trainer"),
        timeout_s=120, what="the first line of progress", also=mapped.why,
    )  # fmt: skip
    lost = str(mapped.pods(FEEDERS)[-1]["metadata"]["name"])
    operator.kubectl("delete", "pod", lost, "-n", namespace, "--grace-period=0", "--force")
    mapped.await_phase("Complete", timeout_s=240)
    log = mapped.logs(TRAINER, "trainer")
    assert "right True" in log
    (pods,) = re.findall(r"^pods (\d+)$", log, re.MULTILINE)
    assert int(pods) >= 2
