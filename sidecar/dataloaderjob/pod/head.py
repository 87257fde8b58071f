"""Ray's container in the head's pod: the GCS, a raylet without room for feeders, and an agent of the supervisor.

    python -m dataloaderjob.pod.head --settings FILE.json

The agent (`providers.ray.agent`) is the job's Ray driver, and serves the supervisor in the other container
(`pod.supervisor`). Whoever holds Ray's token can run code here, so this container has no key of the job's. This process
restarts the agent. Without GCS or raylet it ends, and the kubelet starts a fresh container: feeders' pods find the new
GCS under the same name. Children share this process's output.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from pathlib import Path

from dataloaderjob.core.settings import SupervisorSettings, dump
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
from dataloaderjob.pod.supervisor import supervisor_settings
from dataloaderjob.providers.provider import RAY
from dataloaderjob.providers.ray.node import without_ray

log = logging.getLogger(__name__)

VITAL = ("gcs_server", "raylet")
RAY_INIT_S = 60.0


def agent_settings(settings: HeadSettings, address: str) -> SupervisorSettings:
    """Returns the supervisor's settings as its agent needs them to place feeders. `address`: the GCS's."""
    return supervisor_settings(
        settings, provider=RAY, ray_address=address, num_feeders=0, init_timeout_s=RAY_INIT_S
    )


class Head:
    """The work of Ray's container: a `PodPart`."""

    def __init__(self, settings: HeadSettings, watch: Watch) -> None:
        """Clears the folder. Raises InputError for settings that cannot work."""
        self._settings, self._watch = settings, watch
        check_ray(settings.ray_version)
        self._node = ray_node(settings, VITAL)
        self._folder = fresh_folder(self._node.folder)
        self._agent: Kept | None = None

    def run(self) -> None:
        port = f"--port={self._settings.gcs_port}"
        options = ["--head", "--no-monitor", port, "--include-dashboard=false", *ANY_PORTS, PLAIN]
        self._node.launch(options, env=node_environment(os.environ), cwd=Path.cwd())
        vital = await_started(self._node, self._watch, self._settings.up_timeout_s, "Ray's head")
        address = self._node.address_path.read_text().strip()
        log.info("Ray's head is up at %s", address)
        path = self._folder / "agent.json"
        dump(agent_settings(self._settings, address), path)
        env = {**without_ray(os.environ), **self._node.env()}
        self._agent = Kept("dataloaderjob.providers.ray.agent", path, env, Restarts("the agent"))
        self._agent.run(functools.partial(wait_beside, self._node, self._watch, vital))

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self._node.stop(self._settings.grace_s)


if __name__ == "__main__":
    sys.exit(entry.serve(HeadSettings, Head, name="head"))
