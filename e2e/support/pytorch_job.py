"""A PyTorchJob with the label in its templates, and the pods and Services that the Training Operator 1.8 makes of it.

The Training Operator itself is not needed for these tests, and not part of them.
"""

from __future__ import annotations

import copy

from cluster import FEEDER, Manifest
from injected import template
from jobs import RESTRICTED

CONTAINER = "pytorch"
"""The name that a PyTorchJob prescribes for the container that trains."""
PORT = 23456
PODS = 2
_AWAIT_MASTER = """
import socket, sys, time
while True:
    try:
        sys.exit(not socket.getaddrinfo(sys.argv[1], None))
    except OSError:
        time.sleep(2)
"""


def pytorch_job(name: str, *, of: str) -> Manifest:
    """The object as a user has it: a master and a worker. `of`: the job that serves their pods."""
    found = template(of)
    (trainer,) = found["spec"]["containers"]
    pod = {**found, "spec": {**found["spec"], "containers": [{**trainer, "name": CONTAINER}]}}
    replica = {"replicas": 1, "restartPolicy": "Never", "template": pod}
    return {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}},
    }  # fmt: skip


def made_of(job: Manifest) -> list[Manifest]:
    """What the Training Operator makes of the object: for each replica a Service and a pod."""
    return [
        thing
        for rank, (kind, replica) in enumerate(job["spec"]["pytorchReplicaSpecs"].items())
        for thing in _replica(str(job["metadata"]["name"]), kind.lower(), rank, replica)
    ]


def _replica(job: str, kind: str, rank: int, replica: Manifest) -> list[Manifest]:
    name, master = f"{job}-{kind}-0", f"{job}-master-0"
    labels = {
        "training.kubeflow.org/job-name": job, "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/replica-type": kind, "training.kubeflow.org/replica-index": "0",
        **({"training.kubeflow.org/job-role": "master"} if kind == "master" else {}),
    }  # fmt: skip
    pod = copy.deepcopy(replica["template"])
    variables = {
        "PYTHONUNBUFFERED": "1", "MASTER_PORT": PORT, "PET_MASTER_PORT": PORT, "MASTER_ADDR": master,
        "PET_MASTER_ADDR": master, "WORLD_SIZE": PODS, "RANK": rank, "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": rank, "PET_NNODES": PODS,
    }  # fmt: skip
    for container in pod["spec"]["containers"]:
        container["ports"] = [{"name": "pytorchjob-port", "containerPort": PORT}]
        container["env"] = [{"name": name, "value": str(value)} for name, value in variables.items()]
    if kind == "worker":
        waits = {
            "name": "init-pytorch", "image": FEEDER, "command": ["python", "-c", _AWAIT_MASTER, master],
            "securityContext": RESTRICTED, "resources": {"limits": {"cpu": "100m", "memory": "64Mi"}},
        }  # fmt: skip
        pod["spec"]["initContainers"] = [waits]
    metadata = {"name": name, "labels": {**pod["metadata"]["labels"], **labels}}
    ports = [{"name": "pytorchjob-port", "port": PORT}]
    service = {"clusterIP": "None", "selector": labels, "ports": ports}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": labels},
            "spec": service,
        },
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]},
    ]
