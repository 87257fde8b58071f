"""Nodes of the cluster: their state, and how much room they have."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime

from cluster import FEEDER, RELEASE, SYSTEM, Cluster, CommandFailed, Manifest, run, until
from jobs import RESTRICTED, RESTRICTED_POD

OPERATOR = f"deployment/{RELEASE}-operator"


def not_ready_since(cluster: Cluster, node: str) -> datetime | None:
    """None while it is ready."""
    found = cluster.get("node", node, "default")
    assert found is not None, f"node {node} is gone"
    (ready,) = [c for c in found["status"]["conditions"] if c["type"] == "Ready"]
    return None if ready["status"] == "True" else datetime.fromisoformat(ready["lastTransitionTime"])


def seconds_since(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()


def start_again(cluster: Cluster, node: str) -> None:
    """The node's container, until the node is ready again, and what ran on it: other tests need the webhooks there."""
    run(["docker", "start", node])
    until(lambda: not_ready_since(cluster, node) is None, timeout_s=120, what=f"node {node} ready again")
    for network in cluster.kubectl("get", "daemonsets", "-n", "kube-system", "-o", "name").split():
        cluster.kubectl("rollout", "status", network, "-n", "kube-system", "--timeout=120s")
    until(lambda: not _unavailable(cluster), timeout_s=120, what="all Deployments available")


def _unavailable(cluster: Cluster) -> list[str]:
    found = json.loads(cluster.kubectl("get", "deployments", "-A", "-o", "json"))["items"]
    return [
        one["metadata"]["name"]
        for one in found
        if one["status"].get("availableReplicas", 0) < one["spec"]["replicas"]
    ]


def keep_operator_off(cluster: Cluster, node: str) -> None:
    """Has it run elsewhere, for a test in which the node goes."""
    cluster.kubectl("cordon", node)
    try:
        for pod in cluster.list("pods", SYSTEM, "app.kubernetes.io/name=dataloaderjob-operator"):
            if pod["spec"].get("nodeName") == node:
                cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", SYSTEM)
        cluster.kubectl("rollout", "status", OPERATOR, "-n", SYSTEM, "--timeout=90s")
    finally:
        cluster.kubectl("uncordon", node)


def free_millicores(cluster: Cluster, node: str) -> int:
    """Of the node's CPU, what no pod has asked for."""
    found = cluster.get("node", node, "default")
    assert found is not None, f"node {node} is gone"
    words = ["get", "pods", "-A", "--field-selector", f"spec.nodeName={node}", "-o", "json"]
    pods = json.loads(cluster.kubectl(*words))["items"]
    taken = sum(_asks(pod) for pod in pods if pod["status"]["phase"] in {"Pending", "Running"})
    return _millicores(found["status"]["allocatable"]["cpu"]) - taken


def filler(name: str, node: str, millicores: int, **spec: str) -> Manifest:
    """A pod that asks for so much CPU of a node, and uses none."""
    container = {
        "name": "fills", "image": FEEDER, "command": ["sleep", "3600"], "securityContext": RESTRICTED,
        "resources": {"requests": {"cpu": f"{millicores}m"}},
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node}, "securityContext": RESTRICTED_POD,
            "terminationGracePeriodSeconds": 0, "containers": [container], **spec,
        },
    }  # fmt: skip


def drain(cluster: Cluster, node: str, *, timeout_s: int = 150) -> None:
    """Until all pods but those of DaemonSets have left it."""
    words = ["--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={timeout_s}s"]
    cluster.kubectl("drain", node, *words, timeout_s=timeout_s + 30)


def await_api_server(cluster: Cluster, timeout_s: float = 90.0) -> None:
    """Until it says that it is ready, three times in a row."""
    answers: list[bool] = []

    def look() -> bool:
        answers.append(_api_server_is_ready(cluster))
        return all(answers[-3:]) and len(answers) >= 3

    until(look, timeout_s=timeout_s, what="an API server that is ready")


def _api_server_is_ready(cluster: Cluster) -> bool:
    try:
        return cluster.kubectl("get", "--raw", "/readyz", timeout_s=10) == "ok"
    except (CommandFailed, subprocess.TimeoutExpired):
        return False


def _asks(pod: Manifest) -> int:
    """Init containers that go on beside the others count too; those that end do not."""
    spec = pod["spec"]
    beside = [c for c in spec.get("initContainers", ()) if c.get("restartPolicy") == "Always"]
    return sum(
        _millicores(c.get("resources", {}).get("requests", {}).get("cpu", "0"))
        for c in (*spec["containers"], *beside)
    )


def _millicores(quantity: str) -> int:
    return int(quantity[:-1]) if quantity.endswith("m") else round(float(quantity) * 1000)
