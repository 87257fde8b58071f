"""The supervisor's pod of a job whose feeders run on an existing Ray cluster: a raylet that joins the cluster without
room for feeders, because a Ray driver needs one on its machine, and the supervisor, which is the driver.

    python -m dataloaderjob.pod.driver --settings FILE.json

Before it joins, this process checks the cluster's versions and the token. It exits with EXIT_RAY_REFUSED if a version
differs. It restarts the supervisor. Without its raylet it ends, and the kubelet starts a fresh container. Children
share this process's output.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.settings import (
    NODE_BLOBS,
    NODE_FOLDER,
    TEMP_DIR,
    RayTuning,
    SupervisorSettings,
    dump,
    read_key,
)
from dataloaderjob.core.sockets import EVERYWHERE
from dataloaderjob.pod import entry
from dataloaderjob.pod.entry import (
    ADDRESS_VARIABLE,
    ANY_PORTS,
    PLAIN,
    Kept,
    Refused,
    Restarts,
    Watch,
    await_started,
    fresh_folder,
    node_environment,
    read_token,
    split_address,
    wait_beside,
)
from dataloaderjob.providers.ray.node import RayNode, without_ray

log = logging.getLogger(__name__)

VITAL = ("raylet",)
FIELD = "spec.ray.external"
SUPERVISOR = "dataloaderjob.supervisor.main"
CHECK = "dataloaderjob.providers.ray.external"
CHECK_S = 60.0
"""Deadline of the check, which imports Ray, possibly from a cold disk."""
NO_ROOM = ("--num-gpus=0", "--memory=1")
"""Options for a node on which no feeder fits, whatever resources it asks for. It has no CPUs either."""
ANY_PATCH = {"RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}
"""Ray's own default demands the same patch version of Python."""
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """The supervisor's pod of a job on an existing Ray cluster."""

    job: str
    """Unique name of the job (namespace/name/uid)."""
    key_path: str
    """File with the job's key."""
    feeder_key_path: str
    """File with the feeders' key, which feeders get as an argument."""
    token_path: str | None = None
    """File with the cluster's token; None: the cluster has none."""
    address: str
    """host:port of the cluster's GCS."""
    host: str
    """The name of the Service through which feeders and sidecars find this pod."""
    supervisor_port: int
    num_feeders: int
    """The initial number, if there is no `count_path`."""
    count_path: str | None = None
    """File with the current number of feeders."""
    feeder_resources: Mapping[str, float] = field(default_factory=dict)
    """Resources of one feeder, by Ray's names."""
    feeder_env: Mapping[str, str] = field(default_factory=dict)
    """The manifest's variables for user code."""
    temp_dir: str = TEMP_DIR
    """Folder of Ray's state and ours; at most 40 bytes, because of Unix sockets."""
    wait_timeout_s: float = 60.0
    """Longest wait for a GCS that accepts connections. Then the container's last message names the address."""
    join_timeout_s: float = 120.0
    grace_s: float = 2.0


def supervisor_settings(settings: DriverSettings, address: str) -> SupervisorSettings:
    """Returns the supervisor's settings. `address`: the GCS's. Feeders keep blobs in folders of their Ray nodes."""
    folder = Path(settings.temp_dir) / NODE_FOLDER
    wanted = entry.read_count(settings.count_path, settings.num_feeders)
    return SupervisorSettings(
        job=settings.job, key_path=settings.key_path, blob_folder=str(folder / NODE_BLOBS), ray_address=address,
        num_feeders=wanted, state_path=str(folder / "feeders.json"), bind_host=EVERYWHERE,
        port=settings.supervisor_port, feeder_supervisor_host=settings.host,
        feeder_blob_folder=str(folder / NODE_BLOBS), feeder_key_path=settings.feeder_key_path,
        feeder_resources=dict(settings.feeder_resources), ray_external=True, ray_tag=tag(settings.job),
        feeder_env=dict(settings.feeder_env),
    )  # fmt: skip


def tag(job: str) -> str:
    """Returns the job's name among all jobs of the cluster. It is also the name of a folder on each node."""
    return f"dataloaderjob-{job.replace('/', '-')}"


class Driver:
    """The work of the supervisor's pod: a `PodPart`."""

    def __init__(self, settings: DriverSettings, watch: Watch) -> None:
        """Clears the folder. Raises InputError for settings that cannot work."""
        self._settings, self._watch = settings, watch
        for path in (settings.key_path, settings.feeder_key_path):
            read_key(path)
        token = None
        if settings.token_path is not None:
            read_token(settings.token_path)
            token = Path(settings.token_path)
        self._node = RayNode(
            Path(settings.temp_dir), token_path=token, vital=VITAL, tuning=RayTuning(),
            host=os.environ.get(ADDRESS_VARIABLE) or "127.0.0.1", remedy="give temp_dir a shorter path",
        )  # fmt: skip
        self._folder = fresh_folder(self._node.folder)
        self._supervisor: Kept | None = None

    def run(self) -> None:
        address = self._await_cluster()
        self._check(address)
        env = {**node_environment(os.environ), **ANY_PATCH}
        self._node.launch([f"--address={address}", *NO_ROOM, *ANY_PORTS, PLAIN], env=env, cwd=Path.cwd())
        what = f"this node of the Ray cluster at {self._settings.address}"
        vital = await_started(self._node, self._watch, self._settings.join_timeout_s, what)
        log.info("joined the Ray cluster at %s", address)
        path = self._folder / "supervisor.json"
        dump(supervisor_settings(self._settings, address), path)
        self._supervisor = Kept(SUPERVISOR, path, self._environment(), Restarts("the supervisor"))
        self._supervisor.run(functools.partial(wait_beside, self._node, self._watch, vital))

    def _await_cluster(self) -> str:
        """Waits until the GCS accepts connections. Returns its address, with a numeric host: a new head is another
        cluster under the same name, and a raylet that followed the name would ask that one for what it does not know.
        """
        settings, began = self._settings, time.monotonic()
        host, port = split_address(settings.address)
        while True:
            try:
                with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as sock:
                    return sockets.address_text(str(sock.getpeername()[0]), port)
            except OSError as exc:
                if time.monotonic() - began > settings.wait_timeout_s:
                    raise ServiceError(
                        f"the Ray cluster of {FIELD} is needed at {settings.address}, and nothing accepted there "
                        f"within {settings.wait_timeout_s:.0f} s ({exc}): start it, correct {FIELD}, or allow the "
                        "connection in a NetworkPolicy"
                    ) from exc
            self._watch.wait(RETRY_S)

    def _check(self, address: str) -> None:
        """Asks the cluster for its versions, in a process of its own, which imports Ray. Raises Refused if they differ,
        and ServiceError if the cluster does not answer or needs another token."""
        with subprocess.Popen(
            [sys.executable, "-P", "-m", CHECK, address, "--join"], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, env=self._environment(), start_new_session=True,
        ) as check:  # fmt: skip
            pidfd = os.pidfd_open(check.pid)
            try:
                in_time = self._watch.wait(CHECK_S, [pidfd])
            finally:
                os.close(pidfd)
                check.kill()
            words = check.communicate()[0].splitlines() if in_time else []
        if not in_time:
            raise ServiceError(
                f"the Ray cluster of {FIELD} is needed at {address}, which did not answer as one within "
                f"{CHECK_S:.0f} s: correct {FIELD}"
            )
        try:
            answer: dict[str, Any] = json.loads(words[-1])
        except (IndexError, ValueError) as exc:
            raise ServiceError(
                f"Ray could not be asked about {address}: the lines above may say why"
            ) from exc
        if "error" in answer:
            raise (Refused if answer.get("versions") else ServiceError)(str(answer["error"]))

    def _environment(self) -> dict[str, str]:
        """Returns the environment of processes that join the cluster."""
        return {**without_ray(os.environ), **self._node.env(), **ANY_PATCH}

    def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
        self._node.stop(self._settings.grace_s)


if __name__ == "__main__":
    sys.exit(entry.serve(DriverSettings, Driver, name="head"))
