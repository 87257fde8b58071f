"""The head's pod: Ray's GCS, a raylet without room for feeders, and the supervisor.

    python -m dataloaderjob.pod.head --settings FILE.json

This process restarts the supervisor. Without GCS or raylet it ends, and the kubelet starts a fresh container: feeders'
pods find the new GCS under the same name. Children share this process's output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.memory import FEEDERS_FIELD
from dataloaderjob.core.settings import NODE_BLOBS, NODE_FOLDER, SupervisorSettings, dump, read_key
from dataloaderjob.core.sockets import EVERYWHERE
from dataloaderjob.pod import entry
from dataloaderjob.pod.entry import (
    ANY_PORTS,
    PLAIN,
    HeadSettings,
    Restarts,
    Watch,
    await_started,
    check_ray,
    fresh_folder,
    node_environment,
    ray_node,
)
from dataloaderjob.providers.ray.node import without_ray

log = logging.getLogger(__name__)

VITAL = ("gcs_server", "raylet")
REGISTER_MARGIN_S = 30.0
SUPERVISOR_GRACE_S = 2.0


def feeders_wanted(settings: HeadSettings) -> int:
    """Returns the number of feeders that the operator wants now. Raises InputError."""
    if settings.count_path is None:
        return settings.num_feeders
    try:
        return int(Path(settings.count_path).read_text())
    except (OSError, ValueError) as exc:
        raise InputError(f"cannot read the number of feeders from {settings.count_path}: {exc}") from exc


def supervisor_settings(settings: HeadSettings, address: str) -> SupervisorSettings:
    """Returns the supervisor's settings. `address`: the GCS's. Everything that the supervisor writes is lost with the
    container: the number of feeders next to the settings is the operator's newest."""
    folder = Path(settings.temp_dir) / NODE_FOLDER
    return SupervisorSettings(
        job=settings.job,
        key_path=settings.key_path,
        blob_folder=str(folder / NODE_BLOBS),
        ray_address=address,
        num_feeders=feeders_wanted(settings),
        state_path=str(folder / "feeders.json"),
        bind_host=EVERYWHERE,  # feeders and sidecars are in other pods; both sides authenticate with the job's key
        port=settings.supervisor_port,
        feeder_supervisor_host=settings.host,
        feeder_blob_folder=str(folder / NODE_BLOBS),
        feeder_key_path=settings.feeder_key_path or settings.key_path,
        feeder_bind_host=EVERYWHERE,
        feeder_resources={"feeder": 1.0},
        ready_timeout_s=settings.tuning.worker_register_timeout_s + REGISTER_MARGIN_S,
        worker_register_timeout_s=settings.tuning.worker_register_timeout_s,
        memory_field=FEEDERS_FIELD,
    )


class Head:
    """The work of the head's pod: a `PodPart`."""

    def __init__(self, settings: HeadSettings, watch: Watch) -> None:
        """Clears the folder. Raises InputError for settings that cannot work."""
        self._settings, self._watch = settings, watch
        read_key(settings.key_path)
        check_ray(settings.ray_version)
        self._node = ray_node(settings, VITAL)
        self._folder = fresh_folder(self._node.folder)
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._restarts = Restarts()

    def run(self) -> None:
        port = f"--port={self._settings.gcs_port}"
        options = ["--head", "--no-monitor", port, "--include-dashboard=false", *ANY_PORTS, PLAIN]
        self._node.launch(options, env=node_environment(os.environ), cwd=Path.cwd())
        vital = await_started(self._node, self._watch, self._settings.up_timeout_s, "Ray's head")
        address = self._node.address_path.read_text().strip()
        log.info("Ray's head is up at %s", address)
        dump(supervisor_settings(self._settings, address), self._folder / "supervisor.json")
        while True:
            code = self._supervise(vital)
            delay_s = self._restarts.ended(code, time.monotonic())
            log.warning("the supervisor ended with code %d; restarting it", code)
            self._wait(delay_s, vital)

    def _supervise(self, vital: dict[str, int]) -> int:
        """Runs the supervisor once. Returns its exit code."""
        module = "dataloaderjob.supervisor.main"
        self._supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", module, "--settings", self._folder / "supervisor.json"],
            env={**without_ray(os.environ), **self._node.env()}, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        pidfd = os.pidfd_open(self._supervisor.pid)
        try:
            self._wait(None, vital, pidfd)
        finally:
            os.close(pidfd)
        return self._supervisor.wait()

    def _wait(self, timeout_s: float | None, vital: dict[str, int], *others: int) -> None:
        """Waits for other processes, or `timeout_s`. Raises ServiceError if a vital process ended, Stopped."""
        ready = self._watch.wait(timeout_s, [*vital.values(), *others])
        gone = [name for name, pidfd in vital.items() if pidfd in ready]
        if gone:
            raise entry.ended(self._node, gone)

    def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(SUPERVISOR_GRACE_S)
            self._supervisor.kill()
            self._supervisor.wait()
        self._node.stop(self._settings.grace_s)


if __name__ == "__main__":
    sys.exit(entry.serve(HeadSettings, Head, name="head"))
