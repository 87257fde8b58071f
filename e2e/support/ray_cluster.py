"""A Ray cluster of plain Deployments with the names, labels, ports and token that KubeRay gives to a RayCluster.

KubeRay itself is not needed for these tests, and not part of them.
"""

from __future__ import annotations

from typing import Any

from cluster import TRAINER, Cluster, Manifest, until
from jobs import RESTRICTED, RESTRICTED_POD

NAME = "shared"
TOKEN = "0123456789abcdef" * 4
WORKER = f"ray.io/cluster={NAME},ray.io/node-type=worker"
HEAD = f"ray.io/cluster={NAME},ray.io/node-type=head"
_PORTS = {"gcs-server": 6379, "client": 10001, "dashboard": 8265, "metrics": 8080}
_FEEDERS = r"""
for f in /proc/[0-9]*/cmdline; do tr '\0' ' ' <$f 2>/dev/null; echo; done \
| grep -c -e '[r]ay::Feeder' -e '[d]ataloaderjob.feeder.host'; true
"""
"""Counts the processes of feeders' actors, and of their children, in a pod."""
_ACTORS = (
    "import ray; ray.init('auto', log_to_driver=False, configure_logging=False);"
    "print('actors', len(ray.util.list_named_actors(all_namespaces=True)))"
)


def manifests() -> list[Manifest]:
    """The Secret, the head's Service, and the two Deployments."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": NAME},
        "stringData": {"auth_token": TOKEN},
    }
    service = {
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": f"{NAME}-head-svc", "labels": _labels("head")},
        "spec": {
            "clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels("head"),
            "ports": [{"name": name, "port": port, "appProtocol": "tcp"} for name, port in _PORTS.items()],
        },
    }  # fmt: skip
    head = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
    worker = [f"--address={NAME}-head-svc:6379", "--num-cpus=2"]
    return [secret, service, _deployment("head", head), _deployment("worker", worker)]


def _labels(kind: str) -> dict[str, str]:
    return {
        "ray.io/cluster": NAME, "ray.io/node-type": kind, "ray.io/identifier": f"{NAME}-{kind}",
        "ray.io/group": "headgroup" if kind == "head" else "workers", "ray.io/is-ray-node": "yes",
        "app.kubernetes.io/name": "kuberay", "app.kubernetes.io/created-by": "kuberay-operator",
    }  # fmt: skip


def _deployment(kind: str, options: list[str]) -> Manifest:
    token = {"secretKeyRef": {"name": NAME, "key": "auth_token"}}
    start = [
        "ray", "start", "--block", "--disable-usage-stats", "--memory=4000000000", "--object-store-memory=80000000",
        *options,
    ]  # fmt: skip
    container: dict[str, Any] = {
        "name": f"ray-{kind}", "image": TRAINER, "command": start, "securityContext": RESTRICTED,
        "env": [
            {"name": "RAY_AUTH_MODE", "value": "token"}, {"name": "RAY_AUTH_TOKEN", "valueFrom": token},
            {"name": "HOME", "value": "/tmp"},
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "4Gi"}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }  # fmt: skip
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}}]
    pod = {"securityContext": RESTRICTED_POD, "containers": [container], "volumes": volumes}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": f"{NAME}-{kind}", "labels": _labels(kind)},
        "spec": {
            "selector": {"matchLabels": _labels(kind)},
            "template": {"metadata": {"labels": _labels(kind)}, "spec": pod},
        },
    }  # fmt: skip


def start(cluster: Cluster, namespace: str) -> None:
    """Starts the cluster, and waits for its pods."""
    cluster.apply(namespace, *manifests())
    for kind in ("head", "worker"):
        words = ["rollout", "status", f"deployment/{NAME}-{kind}", "-n", namespace, "--timeout=180s"]
        cluster.kubectl(*words, timeout_s=190)


def feeder_processes(cluster: Cluster, namespace: str) -> int:
    """Number of processes of feeders in the worker's pod."""
    (pod,) = cluster.list("pods", namespace, WORKER)
    words = ["exec", pod["metadata"]["name"], "-n", namespace, "--", "sh", "-c", _FEEDERS]
    return int(cluster.kubectl(*words).split()[-1])


def named_actors(cluster: Cluster, namespace: str) -> int:
    """Number of actors with a name, as Ray lists them."""
    (pod,) = cluster.list("pods", namespace, HEAD)
    words = ["exec", pod["metadata"]["name"], "-n", namespace, "--", "python", "-c", _ACTORS]
    return int(cluster.kubectl(*words).rsplit("actors ", 1)[1])


def await_no_feeder(cluster: Cluster, namespace: str, timeout_s: float) -> None:
    until(
        lambda: feeder_processes(cluster, namespace) == 0,
        timeout_s=timeout_s, what="the lease ends the feeders",
    )  # fmt: skip
