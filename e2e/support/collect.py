"""What is kept of a cluster when a test failed: objects, events, logs of all pods."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from cluster import SYSTEM, Cluster, CommandFailed

KINDS = "dlj,all,configmaps,events,networkpolicies,pvc"


def collect(cluster: Cluster, namespace: str, folder: Path) -> None:
    """Into a folder that is made; what cannot be had is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in (namespace, SYSTEM):
        _write(cluster, folder / f"{place}.yaml", "get", KINDS, "-n", place, "-o", "yaml")
        _write(cluster, folder / f"{place}.txt", "get", KINDS, "-n", place, "-o", "wide")
        with contextlib.suppress(CommandFailed, subprocess.TimeoutExpired):
            for pod in cluster.kubectl("get", "pods", "-n", place, "-o", "name").split():
                name = pod.removeprefix("pod/")
                _write(
                    cluster, folder / f"{name}.log", "logs", name, "-n", place, "--all-containers", "--prefix"
                )
                _write(
                    cluster, folder / f"{name}.before.log", "logs", name, "-n", place, "--all-containers",
                    "--previous", "--prefix",
                )  # fmt: skip
    _write(cluster, folder / "nodes.txt", "describe", "nodes")


def _write(cluster: Cluster, path: Path, *words: str) -> None:
    with contextlib.suppress(CommandFailed, subprocess.TimeoutExpired):
        path.write_text(cluster.kubectl(*words))
