"""The Ray container of the head pod, for a job on an existing Ray cluster. It runs the supervisor's agent, which is the
job's Ray driver. It also runs a raylet, because a driver needs one on its machine. This raylet offers no
resources, so no feeders run on it.

    python -m dataloaderjob.pod.driver --settings FILE.json

Users of the cluster can run code in this container. Therefore, the container has only one of the job's keys: the
feeders' key, which actors receive as an argument. Before this process joins the cluster, it checks the cluster's
versions and the token. It exits with EXIT_RAY_REFUSED if a version differs. It restarts the agent whenever the agent
ends. If the raylet ends, this process ends too, and the kubelet starts a fresh container. Children share this process's
output.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.settings import read_key
from dataloaderjob.pod import entry
from dataloaderjob.pod.entry import (
    ANY_PORTS,
    PLAIN,
    HeadSettings,
    Refused,
    Watch,
    await_started,
    node_environment,
    split_address,
)
from dataloaderjob.pod.head import AgentNode

log = logging.getLogger(__name__)

VITAL = ("raylet",)
FIELD = "spec.ray.external"
CHECK = "dataloaderjob.providers.ray.external"
CHECK_S = 60.0
"""Deadline in seconds for the check of the cluster, which imports Ray, possibly from a cold disk."""
NO_ROOM = ("--num-gpus=0", "--memory=1")
"""Options for a node on which no feeder fits, whatever resources the feeder requests. The node has no CPUs either."""
ANY_PATCH = {"RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}
"""Environment in which Ray accepts any patch version of Python. By default, Ray requires the same one."""
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.5


class Driver:
    """The `PodPart` of the container that joins an existing Ray cluster."""

    def __init__(self, settings: HeadSettings, watch: Watch) -> None:
        """Empties this package's folder in the volume. Raises InputError for settings that cannot work."""
        self._external, self._watch = settings.external, watch
        read_key(settings.feeder_key_path or settings.key_path)
        self._ray = AgentNode(settings, watch, VITAL)

    def run(self) -> None:
        address, node, external = self._await_cluster(), self._ray.node, self._external
        self._check(address)
        options = [f"--address={address}", f"--node-manager-port={external.raylet_port}", *NO_ROOM]
        env = {**node_environment(os.environ), **ANY_PATCH}
        node.launch([*options, *ANY_PORTS, PLAIN], env=env, cwd=Path.cwd())
        what = f"this node of the Ray cluster at {external.address}"
        vital = await_started(node, self._watch, external.join_timeout_s, what)
        log.info("joined the Ray cluster at %s", address)
        self._ray.serve(address, vital, self._environment())

    def _await_cluster(self) -> str:
        """Waits until the GCS accepts connections. Returns the GCS's address, with a numeric host. The host is numeric
        because a new head is a different cluster under the same name. A raylet that followed the name would ask the new
        cluster about objects of the old one.
        """
        external, began = self._external, time.monotonic()
        host, port = split_address(external.address)
        while True:
            try:
                with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as sock:
                    return sockets.address_text(str(sock.getpeername()[0]), port)
            except OSError as exc:
                if time.monotonic() - began > external.wait_timeout_s:
                    raise ServiceError(
                        f"the Ray cluster of {FIELD} must be at {external.address}, but nothing accepted a connection "
                        f"there within {external.wait_timeout_s:.0f} s ({exc}): start the cluster, correct {FIELD}, or "
                        "allow the connection in a NetworkPolicy"
                    ) from exc
            self._watch.wait(RETRY_S)

    def _check(self, address: str) -> None:
        """Asks the cluster for its versions, in a separate process that imports Ray. Raises Refused if they differ, and
        ServiceError if the cluster does not answer or needs a different token."""
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
                f"the Ray cluster of {FIELD} must be at {address}, but no Ray cluster answered there within "
                f"{CHECK_S:.0f} s: correct {FIELD}"
            )
        try:
            answer: dict[str, Any] = json.loads(words[-1])
        except (IndexError, ValueError) as exc:
            raise ServiceError(
                f"could not query Ray about {address}: the lines above may explain why"
            ) from exc
        if "error" in answer:
            raise (Refused if answer.get("versions") else ServiceError)(str(answer["error"]))

    def _environment(self) -> dict[str, str]:
        """Returns the environment of processes that join the cluster."""
        return {**self._ray.environment(), **ANY_PATCH}

    def close(self) -> None:
        self._ray.close()


if __name__ == "__main__":
    sys.exit(entry.serve(HeadSettings, Driver, name="head"))
