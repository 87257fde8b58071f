"""A Ray head on this machine: one in a folder of its own, with a token of its own, at any free port.

`providers.ray.node` has what it shares with the pods of a cluster: how its processes are started, watched and
ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.settings import RayTuning
from dataloaderjob.providers.ray.node import MAX_FOLDER_NBYTES, RayNode, without_ray

__all__ = ["MAX_FOLDER_NBYTES", "VITAL", "RayHead"]

VITAL = ("gcs_server", "raylet")
"""Processes without which a head is dead."""


class RayHead(RayNode):
    """GCS, raylet and their helpers."""

    def __init__(
        self,
        folder: Path,
        *,
        tuning: RayTuning | None = None,
        resources: Mapping[str, float] | None = None,
        env: Mapping[str, str] | None = None,
        base_env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        cwd: Path | None = None,
    ) -> None:
        """`folder` is made; its owner removes it after `stop`.

        `env` is added to `base_env`, or to this process's environment. `cwd` is where feeders run, and
        user code in them; None: `folder`.

        Raises InputError when the folder's path is too long for Ray's Unix sockets.
        """
        super().__init__(
            folder,
            token_path=folder.absolute() / "token",
            vital=VITAL,
            tuning=tuning,
            resources=resources or {"feeder": 64.0},
            host=host,
        )
        self._base_env = base_env
        self._extra_env = dict(env or {})
        self._cwd = cwd or self.folder

    @property
    def log_path(self) -> Path:
        """What `ray start` printed."""
        return self.folder / "head.log"

    def start(self) -> None:
        """Starts the processes; returns before they are up. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.token_path.exists():
            fd = os.open(self.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as out:
                out.write(secrets.token_hex(32))
        base = os.environ if self._base_env is None else self._base_env
        env = {**without_ray(base), **self._extra_env}
        options = ["--head", "--no-monitor", "--port=0", "--include-dashboard=false"]
        self.launch(options, env=env, cwd=self._cwd, log_path=self.log_path)

    def wait_up(self, timeout_s: float = 60.0) -> str:
        """Waits until drivers can connect; returns the address, host:port.

        Raises ServiceError with the last lines that Ray printed when it ends or is late.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (address := self.poll_up()) is not None:
                return address
            time.sleep(0.05)
        raise ServiceError(f"Ray's head was not up after {timeout_s:.0f} s:\n{self._last_lines()}")

    def poll_up(self) -> str | None:
        """The address once drivers can connect. Raises ServiceError when the start failed."""
        if not self.launched or self.start_code() not in (None, 0):
            raise ServiceError(f"Ray's head ended while it started:\n{self._last_lines()}")
        with contextlib.suppress(OSError, ValueError):
            host, port = self.address.rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=1.0).close()
            self._record()
            return self.address
        return None

    @property
    def address(self) -> str:
        """host:port of the GCS. Raises OSError before the head is up.

        It is known 2 s earlier, but a driver that connects before the raylet has registered looks again
        only every few seconds.
        """
        return self.address_path.read_text().strip()

    def _last_lines(self, count: int = 20) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])
        return "(it printed nothing)"
