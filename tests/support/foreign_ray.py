"""A Ray cluster that no job started, and runs whose feeders are placed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from local_runs import Project
from supervised import Head, up, with_support

from dataloaderjob.core.settings import RayTasks

CPUS = 8


class ForeignHead(Head):
    """A head with CPUs, as `ray start --head` starts it, and without anything of ours."""

    def marks(self) -> dict[str, str]:
        return {}

    def auth(self) -> dict[str, str]:
        """What a user sets to be this cluster's client."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_path)}

    def sessions(self) -> list[Path]:
        """What jobs have left in the folders of Ray's sessions."""
        return [path for path in self.folder.glob("session_2*/dataloaderjob/*") if path.exists()]


@contextmanager
def foreign_head(env: Mapping[str, str] | None = None, *, cpus: int = CPUS) -> Iterator[ForeignHead]:
    """A head that is up. `env`: variables of its processes."""
    with tempfile.TemporaryDirectory(prefix="dlj", ignore_cleanup_errors=True) as folder:
        made = ForeignHead(
            Path(folder) / "ray", num_feeders=0, tasks=RayTasks(cpus=cpus),
            env={**os.environ, "PYTHONPATH": with_support(), **(env or {})},
        )  # fmt: skip
        with up(made):
            yield made


def on(head: ForeignHead, folder: Path, *args: Any, **spec: Any) -> Project:
    """A project whose feeders are placed on this cluster."""
    folder.mkdir(exist_ok=True)
    return Project(folder, *args, ray={"external": {"address": head.address}}, **spec)


def feeders_of(ray: ForeignHead) -> list[int]:
    """Pids of the feeders' actors and their hosts on this cluster."""
    found = []
    for pid in ray.pids():
        try:
            process = psutil.Process(pid)
            if "Feeder" in process.name() or any("Feeder" in word for word in process.cmdline()):
                found += [pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.NoSuchProcess:
            continue
    return found


@contextmanager
def described_as(ray: ForeignHead, **versions: str) -> Iterator[None]:
    """The cluster as one of these versions."""
    code = (
        "import json, sys; from ray._raylet import GcsClient; gcs = GcsClient(address=sys.argv[1]);"
        "key, space = b'CLUSTER_METADATA', b'cluster'; found = gcs.internal_kv_get(key, namespace=space);"
        "print(found.decode());"
        "made = json.dumps({**json.loads(found), **json.loads(sys.argv[2])}).encode();"
        "gcs.internal_kv_put(key, made, overwrite=True, namespace=space)"
    )

    def put(change: str) -> str:
        command = [sys.executable, "-c", code, ray.address, change]
        env = {**os.environ, **ray.auth()}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    before = put(json.dumps(versions))
    try:
        yield
    finally:
        put(before)
