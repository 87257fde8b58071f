"""Ray's container in the head's pod: the GCS, a raylet without room for feeders, and an agent of the supervisor.

    python -m dataloaderjob.pod.head --settings FILE.json

The agent (`providers.ray.agent`) is the job's Ray driver, and serves the supervisor in the other container
(`pod.supervisor`). Anyone who holds Ray's token can run code in this container, so it has none of the job's keys. This
process restarts the agent whenever the agent ends. If the GCS or the raylet ends, this process ends too, and the
kubelet starts a fresh container. Feeders' pods find the new GCS under the same name. Children share this process's
output.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dataloaderjob.core.settings import dump
from dataloaderjob.pod import entry
from dataloaderjob.pod.entry import (
    ANY_PORTS,
    PLAIN,
    HeadSettings,
    Kept,
    Restarts,
    Watch,
    await_started,
    check_ray,
    fresh_folder,
    node_environment,
    ray_node,
    wait_beside,
)
from dataloaderjob.pod.supervisor import agent_settings
from dataloaderjob.providers.ray.node import without_ray

log = logging.getLogger(__name__)

VITAL = ("gcs_server", "raylet")
AGENT = "dataloaderjob.providers.ray.agent"


class AgentNode:
    """A Ray node in the head's pod, and the supervisor's agent beside it. `pod.head` and `pod.driver` use it."""

    def __init__(self, settings: HeadSettings, watch: Watch, vital: Sequence[str]) -> None:
        """Empties this package's folder in the volume. Raises InputError for settings that cannot work."""
        self._settings, self._watch = settings, watch
        self.node = ray_node(settings, vital)
        self._folder = fresh_folder(self.node.folder)
        self._agent: Kept | None = None

    def serve(self, address: str, vital: Mapping[str, int], env: Mapping[str, str]) -> NoReturn:
        """Keeps the agent running while the node's vital processes run. `address`: the GCS's address; `env`: the
        agent's environment. Raises Stopped. Raises ServiceError if a vital process ended, or if a restart of the
        agent would not help."""
        path = self._folder / "agent.json"
        dump(agent_settings(self._settings, address), path)
        self._agent = Kept(AGENT, path, env, Restarts("the agent"))
        self._agent.run(functools.partial(wait_beside, self.node, self._watch, vital))

    def environment(self) -> dict[str, str]:
        """Returns the environment of processes that are clients of this Ray cluster."""
        return {**without_ray(os.environ), **self.node.env()}

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self.node.stop(self._settings.grace_s)


class Head:
    """The `PodPart` of the container with the job's own Ray cluster."""

    def __init__(self, settings: HeadSettings, watch: Watch) -> None:
        """Empties this package's folder in the volume. Raises InputError for settings that cannot work."""
        self._settings, self._watch = settings, watch
        check_ray(settings.ray_version)
        self._ray = AgentNode(settings, watch, VITAL)

    def run(self) -> None:
        port = f"--port={self._settings.gcs_port}"
        options = ["--head", "--no-monitor", port, "--include-dashboard=false", *ANY_PORTS, PLAIN]
        node = self._ray.node
        node.launch(options, env=node_environment(os.environ), cwd=Path.cwd())
        vital = await_started(node, self._watch, self._settings.up_timeout_s, "Ray's head")
        address = node.address_path.read_text().strip()
        log.info("Ray's head is up at %s", address)
        self._ray.serve(address, vital, self._ray.environment())

    def close(self) -> None:
        self._ray.close()


if __name__ == "__main__":
    sys.exit(entry.serve(HeadSettings, Head, name="head"))
