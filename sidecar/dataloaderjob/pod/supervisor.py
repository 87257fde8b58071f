"""The supervisor's container in the head's pod. It has the job's key, but neither Ray nor Ray's token.

    python -m dataloaderjob.pod.supervisor --settings FILE.json

The supervisor reaches Ray through a socket that Ray's container serves (`pod.head` or `pod.driver`). This process
restarts the supervisor, which ends whenever the agent in Ray's container does. Children share this process's output.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from dataloaderjob.core.memory import FEEDERS_FIELD
from dataloaderjob.core.settings import NODE_BLOBS, NODE_FOLDER, SupervisorSettings, dump, read_key
from dataloaderjob.core.sockets import EVERYWHERE
from dataloaderjob.pod import entry
from dataloaderjob.pod.entry import HeadSettings, Kept, Restarts, Watch, fresh_folder
from dataloaderjob.providers.provider import RAY, REMOTE
from dataloaderjob.providers.ray.node import without_ray

REGISTER_MARGIN_S = 30.0
LINK_NAME = "ray"
RAY_INIT_S = 60.0
AWAIT_RAY_S = 600.0
"""Maximum wait in seconds for Ray's container, which the kubelet may restart after growing pauses."""


def feeders_wanted(settings: HeadSettings) -> int:
    """Returns the number of feeders that the operator wants now. Raises InputError."""
    return entry.read_count(settings.count_path, settings.num_feeders)


def supervisor_settings(
    settings: HeadSettings,
    *,
    num_feeders: int,
    provider: str = REMOTE,
    ray_address: str = "",
    init_timeout_s: float = AWAIT_RAY_S,
) -> SupervisorSettings:
    """Returns the supervisor's settings. Everything that the supervisor writes is lost with the container, so
    `num_feeders` must be the number that the operator wants now."""
    folder, external = Path(settings.temp_dir) / NODE_FOLDER, settings.external
    made = SupervisorSettings(
        job=settings.job,
        key_path=settings.key_path,
        blob_folder=str(folder / NODE_BLOBS),
        provider=provider,
        ray_address=ray_address,
        provider_socket=str(Path(settings.link_folder) / LINK_NAME),
        num_feeders=num_feeders,
        state_path=str(folder / "feeders.json"),
        bind_host=EVERYWHERE,  # feeders and sidecars are in other pods; both sides authenticate with role keys
        port=settings.supervisor_port,
        feeder_supervisor_host=settings.host,
        feeder_blob_folder=str(folder / NODE_BLOBS),
        feeder_key_path=settings.feeder_key_path or settings.key_path,
        feeder_bind_host=EVERYWHERE,
        feeder_resources={"feeder": 1.0},
        ready_timeout_s=settings.tuning.worker_register_timeout_s + REGISTER_MARGIN_S,
        init_timeout_s=init_timeout_s,
        worker_register_timeout_s=settings.tuning.worker_register_timeout_s,
        memory_field=FEEDERS_FIELD,
        tls_folder=settings.tls_folder,
        feeder_tls_folder=settings.tls_folder,
    )
    if not external.address:
        return made
    return dataclasses.replace(
        made, ray_external=True, ray_tag=tag(settings.job), feeder_env=dict(external.feeder_env),
        feeder_resources=dict(external.feeder_resources), memory_field="",
    )  # fmt: skip


def agent_settings(settings: HeadSettings, address: str) -> SupervisorSettings:
    """Returns the settings with which the supervisor's agent places feeders. `address`: the GCS's address."""
    return supervisor_settings(
        settings, provider=RAY, ray_address=address, num_feeders=0, init_timeout_s=RAY_INIT_S
    )


def tag(job: str) -> str:
    """Returns the job's unique name on an existing Ray cluster. It is also the name of a folder on each node."""
    return f"dataloaderjob-{job.replace('/', '-')}"


class SupervisorPart:
    """The `PodPart` of the supervisor's container."""

    def __init__(self, settings: HeadSettings, watch: Watch) -> None:
        """Empties this package's folder in the volume. Raises InputError for settings that cannot work."""
        self._watch = watch
        read_key(settings.key_path)
        folder = fresh_folder(Path(settings.temp_dir))
        path = folder / "supervisor.json"
        dump(supervisor_settings(settings, num_feeders=feeders_wanted(settings)), path)
        restarts = Restarts("the supervisor", max_ray_exits=None)
        self._supervisor = Kept("dataloaderjob.supervisor.main", path, without_ray(os.environ), restarts)

    def run(self) -> None:
        self._supervisor.run(self._watch.wait)

    def close(self) -> None:
        self._supervisor.close()


if __name__ == "__main__":
    sys.exit(entry.serve(HeadSettings, SupervisorPart, name="supervisor"))
