"""What user code on the feeders of a cluster has: its data, its variables, and a log that shows what it prints."""

from __future__ import annotations

import pytest
from cluster import Cluster, until
from jobs import FEEDERS, TRAINER, changed, job

pytestmark = pytest.mark.timeout(300)
PROGRAM = """
import os, socket, time, torch
from dataloaderjob import DataLoader
class Set(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        print(f"sample {i} on {socket.gethostname()} with {os.environ['PASSWORD']}")
        return torch.tensor([i + int(open("/data/offset").read())])
for batch in DataLoader(Set(), batch_size=4): print("batch", batch.flatten().tolist())
time.sleep(10)  # head and feeders go with the trainers, and their logs with them
"""


def test_volumes_and_variables_reach_feeders_and_their_output_is_logged(
    operator: Cluster, namespace: str, start
):
    operator.apply(
        namespace,
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "login"},
            "stringData": {"password": "sesame"},
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "data"}, "data": {"offset": "100"}},
    )
    feeders = {
        "spec": {
            "volumes": [{"name": "data", "configMap": {"name": "data"}}],
            "containers": [
                {
                    "name": "feeder",
                    "env": [
                        {
                            "name": "PASSWORD",
                            "valueFrom": {"secretKeyRef": {"name": "login", "key": "password"}},
                        }
                    ],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }
            ],
        }
    }
    trained = start(changed(job("prints", program=PROGRAM), spec__feeders__template=feeders))
    printed: dict[str, str] = {}

    def look() -> bool:
        for pod in trained.pods(FEEDERS):
            printed[pod["metadata"]["name"]] = operator.logs(pod["metadata"]["name"], namespace)
        return any("sample 7" in text for text in printed.values())

    until(look, timeout_s=120, every_s=0.2, what="what the dataset prints", also=trained.why)
    trained.await_phase("Complete")
    (name,) = printed
    assert f"[feeder-0] sample 0 on {name} with sesame" in printed[name]
    assert "batch [104, 105, 106, 107]" in trained.logs(TRAINER, "trainer")
