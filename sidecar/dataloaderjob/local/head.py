"""A Ray head on this machine: started, watched and ended as one thing.

`ray start --head` in a session of its own, with no CPUs (feeders are placed by a resource named "feeder",
and Ray starts no workers ahead of need), no dashboard, autoscaler or client server, a small object store,
token authentication, and all state in one folder. Without `--block`, which would kill the raylet and with
it all feeders as soon as the GCS dies. Ray's processes outlive a SIGTERM, so every process of the session
is recorded by a pidfd, and what is left after the grace is killed by it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.core.settings import RayTuning

log = logging.getLogger(__name__)

OBJECT_STORE_NBYTES = 80 * 1024 * 1024
"""Ray's smallest is 75 MB. Nothing of the data path is in it."""
MAX_FOLDER_NBYTES = 40
"""Ray adds up to 64 bytes to it for the paths of Unix sockets, which hold 107."""
VITAL = ("gcs_server", "raylet")
"""Processes without which a head is dead."""
_START = (
    "import ray.scripts.scripts as scripts; "
    "from ray._private.node import Node; "
    "scripts.get_ray_client_dependency_error = lambda: 'not wanted'; "
    "Node.start_api_server = lambda *args, **options: None; "
    "scripts.main()"
)
"""`ray start` has no option to leave out Ray's client server (60 MB, a fixed port) and the dashboard's
process, which without a dashboard only counts usage (120 MB): a second of start each on two cores."""


@dataclass(slots=True)
class _Process:
    pid: int
    name: str
    pidfd: int

    def alive(self) -> bool:
        """A process that has ended is readable, also while it is a zombie."""
        return not select.select([self.pidfd], [], [], 0)[0]

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class RayHead:
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
        self.folder = folder.absolute()
        if len(os.fsencode(self.folder)) > MAX_FOLDER_NBYTES:
            raise InputError(
                f"Ray needs a folder whose path has at most {MAX_FOLDER_NBYTES} bytes for its sockets, "
                f"found {self.folder}: set TMPDIR to a shorter path"
            )
        self.tuning = tuning or RayTuning()
        self._resources = dict(resources or {"feeder": 64.0})
        self._base_env = base_env
        self._extra_env = dict(env or {})
        self._host = host
        self._cwd = cwd or self.folder
        self._head: subprocess.Popen[bytes] | None = None
        self._processes: dict[int, _Process] = {}
        self.token_path = self.folder / "token"

    @property
    def log_path(self) -> Path:
        """What `ray start` printed."""
        return self.folder / "head.log"

    def env(self) -> dict[str, str]:
        """Environment for every process that talks to this Ray: authentication, tuning."""
        return {
            **self.tuning.env(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def start(self) -> None:
        """Starts the processes; returns before they are up. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)
        if not self.token_path.exists():
            fd = os.open(self.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as out:
                out.write(secrets.token_hex(32))
        base = os.environ if self._base_env is None else self._base_env
        env = {k: v for k, v in base.items() if not k.startswith("RAY_")}
        with self.log_path.open("ab") as out:
            self._head = subprocess.Popen(
                self._command(),
                env={**env, **self._extra_env, **self.env()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self._cwd,
            )
        self._record()

    def _command(self) -> list[str]:
        return [
            sys.executable, "-P", "-c", _START, "start", "--head", "--no-monitor",
            f"--temp-dir={self.folder}", f"--node-ip-address={self._host}", "--port=0",
            "--num-cpus=0", f"--resources={json.dumps(self._resources)}",
            f"--object-store-memory={OBJECT_STORE_NBYTES}", "--include-dashboard=false",
            "--disable-usage-stats",
        ]  # fmt: skip

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
        if self._head is None or self._head.poll() not in (None, 0):
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
        return (self.folder / "ray_current_cluster").read_text().strip()

    def pids(self) -> dict[int, str]:
        """Processes of this head, recorded now or before, that live: pid to name."""
        self._record()
        return {p.pid: p.name for p in self._processes.values() if p.alive()}

    def alive(self) -> bool:
        """Whether the GCS and the raylet live."""
        return set(VITAL) <= set(self.pids().values())

    def vital_pidfds(self) -> dict[str, int]:
        """Pidfds of the GCS and the raylet, once they run; valid until `stop`."""
        self._record()
        return {p.name: p.pidfd for p in self._processes.values() if p.name in VITAL}

    def stop(self, grace_s: float = 5.0) -> None:
        """Ends every process: SIGTERM, and SIGKILL to those that live after `grace_s`. Safe to call twice."""
        if self._head is None:
            return
        self._record()
        for process in self._processes.values():
            process.signal(signal.SIGTERM)
        self._wait_ended(grace_s)
        for _ in range(20):  # a process that starts others while it is being ended
            self._record()
            left = [p for p in self._processes.values() if p.alive()]
            if not left:
                break
            for process in left:
                process.signal(signal.SIGKILL)
            self._wait_ended(1.0)
        self._head.wait()
        for process in self._processes.values():
            os.close(process.pidfd)
        self._processes.clear()
        self._head = None

    def _wait_ended(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(p.alive() for p in self._processes.values()):
            if self._head is not None:
                self._head.poll()
            time.sleep(0.02)

    def _record(self) -> None:
        """Records the processes of the session, also those whose parents are gone."""
        if self._head is None:
            return
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            known = self._processes.get(pid)
            if known is not None and known.alive():
                continue
            found = _session_and_name(pid)
            if found is None or found[0] != self._head.pid:
                continue
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                if _session_and_name(pid) is None:
                    os.close(pidfd)
                    continue
                if known is not None:
                    os.close(known.pidfd)
                self._processes[pid] = _Process(pid, found[1], pidfd)

    def _last_lines(self, count: int = 20) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])
        return "(it printed nothing)"


def _session_and_name(pid: int) -> tuple[int, str] | None:
    """Session and name of a process that is no zombie, None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    state, _, _, session = stat[stat.rindex(")") + 2 :].split()[:4]
    return None if state in "ZX" else (int(session), name)
