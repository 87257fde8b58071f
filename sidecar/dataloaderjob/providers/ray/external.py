"""The conditions that an existing Ray cluster must meet before a job may place feeders on it.

    python -m dataloaderjob.providers.ray.external HOST:PORT [--join]

This command prints {"host": address of this machine's node}, or {"error": text, "versions": true if a version differs}.
With --join, for a pod that is about to become a node, "host" is empty. Callers run the command in a separate process,
because Ray's client waits 40 s for a GCS that does not answer. The job's Ray driver repeats the check when it connects,
because the cluster may have been replaced since.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import gcs_pb2
from ray.exceptions import AuthenticationError

from dataloaderjob.core.errors import ServiceError, first_line
from dataloaderjob.core.sockets import parse_address

TIMEOUT_S = 10.0
FIELD = "spec.ray.external"
JOIN = "--join"
HERE = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token (RAY_AUTH_MODE=disabled for a cluster "
    "without one)"
)
IN_POD = f"name the Secret with the cluster's token in {FIELD}.tokenSecretRef"


class VersionsDiffer(ServiceError):
    """The cluster has a different version of Ray, or a different minor version of Python."""


class Node(NamedTuple):
    """A node of the cluster."""

    host: str
    raylet: str
    """Path of the socket of the node's raylet."""
    alive: bool


def look(address: str) -> str:
    """Returns the address of this machine's node. Raises ServiceError if the cluster cannot run the job's feeders."""
    alive: Any = gcs_pb2.GcsNodeInfo  # type: ignore[attr-defined]
    return here(
        address,
        [
            Node(i.node_manager_address, i.raylet_socket_name, i.state == alive.GcsNodeState.ALIVE)
            for i in described(address)
        ],
    )


def described(address: str, *, remedy: str = HERE) -> list[Any]:
    """Returns the GCS's records of the cluster's nodes. `remedy`: the advice if the cluster refuses the token.

    Raises VersionsDiffer. Raises ServiceError if the cluster does not answer or needs a different token.
    """
    try:
        socket.create_connection(
            parse_address(address), timeout=TIMEOUT_S
        ).close()  # Ray's client would wait for 40 s
        gcs: Any = GcsClient(address=address)
        found = gcs.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=TIMEOUT_S)
        infos = gcs.get_all_node_info(timeout=TIMEOUT_S).values()
    except AuthenticationError as exc:
        raise ServiceError(f"the Ray cluster at {address} refused this process's token: {remedy}") from exc
    except Exception as exc:
        raise ServiceError(
            f"no Ray cluster answers at {address}: {first_line(exc)}; set {FIELD}.address to the host:port of the "
            "cluster's GCS"
        ) from exc
    compare_versions(json.loads(found or b"{}"), ray=ray.__version__, python=platform.python_version())
    return list(infos)


def compare_versions(cluster: Mapping[str, Any], *, ray: str, python: str) -> None:
    """Raises VersionsDiffer unless the cluster has this version of Ray and this minor version of Python. `cluster`: the
    cluster's metadata, which contains both versions."""
    theirs = str(cluster.get("ray_version", "unknown")), str(cluster.get("python_version", "unknown"))
    if theirs[0] == ray and minor(theirs[1]) == minor(python):
        return
    raise VersionsDiffer(
        f"the Ray cluster of {FIELD} runs Ray {theirs[0]} on Python {theirs[1]}, but this job has Ray {ray} on Python "
        f"{python}, and both need the same Ray version and the same minor version of Python: install "
        f"ray=={theirs[0]} on Python {minor(theirs[1])} here (on Kubernetes: in the feeders' image), or choose a "
        "different cluster"
    )


def minor(version: str) -> str:
    """Returns the major and minor parts of a version."""
    return ".".join(version.split(".")[:2])


def here(address: str, nodes: Iterable[Node]) -> str:
    """Returns the address of the node on this machine. Raises ServiceError if there is none."""
    live = [node for node in nodes if node.alive]
    for node in live:
        if Path(node.raylet).exists() and is_local(node.host):
            return node.host
    hosts = ", ".join(sorted({node.host for node in live})[:8]) or "none"
    raise ServiceError(
        f"this machine must be a node of the Ray cluster at {address}, whose live nodes are {hosts}: run "
        f"`ray start --address={address} --num-cpus=0` here first"
    )


def is_local(host: str) -> bool:
    """Returns True if this machine has the address `host`."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.bind((host, 0))
    except OSError:
        return False
    return True


def main() -> int:
    address, *options = sys.argv[1:]
    answer: dict[str, Any] = {"host": ""}
    try:
        if JOIN in options:
            described(address, remedy=IN_POD)
        else:
            answer["host"] = look(address)
    except ServiceError as exc:
        answer = {"error": str(exc), "versions": isinstance(exc, VersionsDiffer)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
