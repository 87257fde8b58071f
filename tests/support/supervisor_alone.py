"""A real supervisor's port without Ray: what it is told of feeders and Ray is what a test tells it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from dataloaderjob.core import handshake, keys, sockets
from dataloaderjob.core.settings import RayTuning, SupervisorSettings
from dataloaderjob.core.supervision import name_of
from dataloaderjob.supervisor.feeder_set import Endpoint
from dataloaderjob.supervisor.main import Supervisor


class SupervisorAlone:
    """Serves at `host`:`port` until the process ends."""

    def __init__(
        self, folder: Path, *, job: str, key: bytes, host: str, port: int, feeders: int = 1,
        tls_folder: str = "",
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "key").write_bytes(key)
        self.key, self.job, self.address = key, job, (host, port)
        self._supervisor = Supervisor(
            SupervisorSettings(
                job=job, key_path=str(folder / "key"), blob_folder=str(folder / "blobs"), ray_address="nowhere:1",
                state_path=str(folder / "feeders.json"), port=port, bind_host=host, num_feeders=feeders,
                feeder_blob_folder=str(folder / "blobs"), tls_folder=tls_folder,
            )
        )  # fmt: skip
        self.scaled = 0
        control = self._supervisor.control

        def counted(message: dict[str, Any]) -> dict[str, Any]:
            self.scaled += message.get("type") == "scale"
            return control(message)

        self._supervisor.control = counted  # type: ignore[method-assign]

    @property
    def desired(self) -> int:
        return self._supervisor._feeders.desired

    def serving(self) -> set[str]:
        """Instances of the feeders that sidecars are told of."""
        return {str(feeder["instance"]) for feeder in self._supervisor.listing()["feeders"]}

    def ends_feeders(self) -> None:
        """All feeders have ended, as was asked for."""
        self._supervisor._ended = True

    @property
    def is_to_end(self) -> bool:
        """True once it was asked to end all feeders."""
        return self._supervisor._ending is not None

    def has_ray(self, tuning: RayTuning | None = None) -> None:
        """Ray has answered."""
        self._supervisor._provider.in_force = {"version": "2.60.0", **(tuning or RayTuning()).config()}

    def ready(self, *numbers: int, host: str = "127.0.0.1") -> None:
        """These feeders report."""
        for number in numbers:
            self.reports(Endpoint(name_of(number), f"i{number}", host, 1000 + number))

    def reports(self, feeder: Endpoint) -> None:
        """One feeder reports, and sidecars that are connected are told."""
        self._supervisor.feeder_ready(feeder)
        self._supervisor._server.publish()

    def leaves(self, number: int) -> None:
        self._supervisor.feeder_left(name_of(number), f"i{number}")
        self._supervisor._server.publish()

    def sidecar(self, name: str = "sidecar-t-0-1") -> sockets.Connection:
        """A sidecar's connection."""
        sock = sockets.dial(self.address, 10)
        handshake.greet(sock, keys.of_job(self.key), role="sidecar", name=name, job=self.job)
        return sock


def says(sidecar: socket.socket, *failures: dict[str, str], **metrics: int) -> None:
    """Its metrics, all others 0."""
    message = {"type": "metrics", "metrics": metrics, "receivers": 1, "failures": list(failures)}
    sockets.send_message(sidecar, message)
