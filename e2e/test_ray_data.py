"""Ray Data on a cluster: its tasks run in all pods of feeders, and the pod that reads for both ranks is killed."""

from __future__ import annotations

import json
import re

import pytest
from cluster import ROOT, Cluster, run, until
from jobs import FEEDERS, TRAINER, Job, changed, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
IMAGE = "ray-data:1"
ROWS = 1_800
PROGRAM = f"""
import json, os, socket, time
import torch.distributed as dist
from dataloaderjob import DataLoader, RayData
dist.init_process_group("gloo")
def worked(batch):
    time.sleep(0.5)
    return {{"id": batch["id"], "host": [socket.gethostname()] * len(batch["id"])}}
def make():
    import ray
    print("slot of", socket.gethostname(), flush=True)
    return ray.data.range({ROWS}, override_num_blocks=60).map_batches(worked)
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


def image(cluster: Cluster) -> str:
    """The image of the guide, on the cluster's workers."""
    guide = (ROOT / "docs/guide/ray-data.md").read_text()
    (dockerfile,) = re.findall(r"^```dockerfile\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    run(["docker", "build", "-t", IMAGE, "-"], stdin=dockerfile, timeout_s=600)
    nodes = cluster.kubectl(
        "get", "nodes", "--selector=!node-role.kubernetes.io/control-plane",
        "--output=jsonpath={.items[*].metadata.name}",
    )  # fmt: skip
    words = ["kind", "load", "docker-image", "--name", cluster.name, IMAGE]
    run([*words, f"--nodes={','.join(nodes.split())}"], timeout_s=600)
    return IMAGE


def told(of: Job, word: str) -> list[list[list[int]]]:
    """What each rank printed after this word."""
    return [
        json.loads(found)
        for found in re.findall(rf"^{word} (.*)$", of.logs(TRAINER, "trainer"), re.MULTILINE)
    ]


def test_ray_data_feeds_two_trainers_from_all_pods_and_goes_on_when_the_pod_that_reads_is_lost(
    operator: Cluster, namespace: str, start
):
    made = job("ray-data", program=PROGRAM, image=image(operator), trainers=2, feeders=2)
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
