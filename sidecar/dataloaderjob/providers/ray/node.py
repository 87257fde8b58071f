"""Ray's processes on one node, which are started, watched and ended together. `local` and `pod` use this module.

`ray start` runs in its own session, without a dashboard or client server. The node has a small object store, and
authenticates with the cluster's token, if any. Feeders are placed by a resource named "feeder". Unless user code may
start tasks, the node has no CPUs, so that Ray starts no workers before they are needed. `--block` is not used, because
it would kill the raylet and all feeders as soon as the GCS dies. Ray's processes may survive a SIGTERM. This module
therefore records a pidfd for every process of the session, and kills the processes that are left after the grace
period. This module does not import Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.places import RAY_TASKS_VARIABLE
from dataloaderjob.core.processes import alive
from dataloaderjob.core.settings import FeederSettings, RayTasks, RayTuning, dump

MAX_FOLDER_NBYTES = 40
"""Maximum size in bytes of the folder's path. Ray appends up to 64 bytes for Unix sockets, whose paths may have at most
107."""
NO_TASKS = RayTasks()
NOTHING: Mapping[str, str] = MappingProxyType({})
HOST_MODULE = "dataloaderjob.feeder.host"
"""The module that a node runs for a feeder. This package must not import it."""
_START = (
    "import ray.scripts.scripts as scripts; "
    "from ray._private.node import Node; "
    "scripts.get_ray_client_dependency_error = lambda: 'not wanted'; "
    "Node.start_api_server = lambda *args, **options: None; "
    "scripts.main()"
)
"""Code that runs `ray start` without Ray's client server (60 MB, a fixed port) and without the dashboard's process (120
MB). Without a dashboard, that process only collects usage statistics. `ray start` has no option to omit either of them.
On two cores, each delays the start by a second."""


@dataclass(slots=True)
class _Process:
    pid: int
    name: str
    pidfd: int

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class RayNode:
    """A Ray node: a raylet, its helpers and, with `--head`, the GCS."""

    def __init__(
        self,
        folder: Path,
        *,
        token_path: Path | None,
        vital: Sequence[str],
        tuning: RayTuning | None = None,
        resources: Mapping[str, float] | None = None,
        tasks: RayTasks = NO_TASKS,
        host: str = "127.0.0.1",
        remedy: str = "set TMPDIR to a shorter path",
    ) -> None:
        """`folder`: the folder for all state. `token_path`: None for a cluster without a token. `vital`: names of
        processes; the node counts as dead if one of them ends.

        Raises InputError, with `remedy`, if the folder's path is too long for Ray's Unix sockets.
        """
        self.folder = folder.absolute()
        if len(os.fsencode(self.folder)) > MAX_FOLDER_NBYTES:
            raise InputError(
                f"Ray needs a folder whose path has at most {MAX_FOLDER_NBYTES} bytes for its sockets, "
                f"but {self.folder} is longer: {remedy}"
            )
        self.token_path = token_path
        self.tuning = tuning or RayTuning()
        self._vital = frozenset(vital)
        self._resources, self._tasks = dict(resources or {}), tasks
        self._host = host
        self._starter: subprocess.Popen[bytes] | None = None
        self._processes: dict[int, _Process] = {}

    @property
    def address_path(self) -> Path:
        """File to which `ray start` writes the address of the GCS as its last step."""
        return self.folder / "ray_current_cluster"

    def env(self) -> dict[str, str]:
        """Returns the variables that every client of this Ray cluster needs, for authentication and tuning."""
        auth = {"RAY_AUTH_MODE": "disabled"}
        if self.token_path is not None:
            auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token_path)}
        return {**self.tuning.env(), **auth, "RAY_USAGE_STATS_ENABLED": "0"}

    def defaults(self) -> dict[str, str]:
        """Returns variables that the environment may override. Unless user code may start tasks, they disable Ray's
        memory monitor. The monitor would act before the kernel, and end the whole feeder. The kernel kills only the
        process that grows, and the feeder can report this."""
        return {} if self._tasks.cpus else {"RAY_memory_monitor_refresh_ms": "0"}

    def marks(self) -> dict[str, str]:
        """Returns variables that show feeders' actors whether user code may start tasks."""
        return {RAY_TASKS_VARIABLE: "1"} if self._tasks.cpus else {}

    def launch(
        self, options: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path | None = None
    ) -> None:
        """Starts the processes; returns before they are up. Raises OSError.

        `env`: the environment of user code in feeders, to which Ray's own variables are added. `cwd`: the working
        directory of user code. `log_path`: the file for the output of `ray start`; None for this process's own output.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.address_path.unlink(missing_ok=True)
        # The config of the head's GCS applies to all nodes, and the GCS can be asked for it.
        config = [f"--system-config={json.dumps(self.tuning.config())}"] if "--head" in options else []
        command = [
            sys.executable, "-P", "-c", _START, "start", *options, *config,
            f"--temp-dir={self.folder}", f"--node-ip-address={self._host}", f"--num-cpus={self._tasks.cpus}",
            f"--resources={json.dumps(self._resources)}", "--disable-usage-stats",
            f"--object-store-memory={self._tasks.object_store_nbytes}",
        ]  # fmt: skip
        with contextlib.ExitStack() as stack:
            out = None if log_path is None else stack.enter_context(log_path.open("ab"))
            self._starter = subprocess.Popen(
                command, env={**self.defaults(), **env, **self.marks(), **self.env()}, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True, cwd=cwd,
            )  # fmt: skip
        self._record()

    def start_code(self) -> int | None:
        """Returns the exit code of `ray start`; None while it runs. Raises RuntimeError before `launch`."""
        if self._starter is None:
            raise RuntimeError("launch() must be called before start_code()")
        return self._starter.poll()

    def pids(self) -> dict[int, str]:
        """Returns the live processes of this node, as a mapping from pid to name."""
        self._record()
        return {p.pid: p.name for p in self._processes.values() if alive(p.pidfd)}

    def pid_of(self, name: str) -> int | None:
        """Returns the pid of the process of this name, even if it has ended; None if there was none."""
        return next((p.pid for p in self._processes.values() if p.name == name), None)

    def alive(self) -> bool:
        """Returns True if all vital processes are alive."""
        return self._vital <= set(self.pids().values())

    def vital_pidfds(self) -> dict[str, int]:
        """Returns the pidfds of the vital processes seen so far, by name. They are valid until `stop`."""
        self._record()
        return {p.name: p.pidfd for p in self._processes.values() if p.name in self._vital}

    def stop(self, grace_s: float = 5.0) -> None:
        """Ends every process: sends SIGTERM, then SIGKILL to those that are still alive after `grace_s`. Safe to call
        twice."""
        if self._starter is None:
            return
        self._record()
        for process in self._processes.values():
            process.signal(signal.SIGTERM)
        self._wait_ended(grace_s)
        for _ in range(20):  # for processes that start others while they are being ended
            self._record()
            left = [p for p in self._processes.values() if alive(p.pidfd)]
            if not left:
                break
            for process in left:
                process.signal(signal.SIGKILL)
            self._wait_ended(1.0)
        self._starter.wait()
        for process in self._processes.values():
            os.close(process.pidfd)
        self._processes.clear()
        self._starter = None

    def _wait_ended(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(alive(p.pidfd) for p in self._processes.values()):
            if self._starter is not None:
                self._starter.poll()
            time.sleep(0.02)

    def _record(self) -> None:
        """Records the processes of the session, including those whose parents are gone."""
        if self._starter is None:
            return
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            known = self._processes.get(pid)
            if known is not None and alive(known.pidfd):
                continue
            found = _session_and_name(pid)
            if found is None or found[0] != self._starter.pid:
                continue
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                if _session_and_name(pid) is None:
                    os.close(pidfd)
                    continue
                if known is not None:
                    os.close(known.pidfd)
                self._processes[pid] = _Process(pid, found[1], pidfd)


def without_ray(env: Mapping[str, str]) -> dict[str, str]:
    """Returns a copy of the environment without Ray's variables (RAY_*). This package sets those that are needed."""
    return {name: value for name, value in env.items() if not name.startswith("RAY_")}


def ray_of_tasks(env: Mapping[str, str], address: str) -> dict[str, str]:
    """Returns the variables that user code needs to connect to the Ray cluster at `address`; empty if user code may not
    start tasks. `env`: the node's environment."""
    if RAY_TASKS_VARIABLE not in env:
        return {}
    own = {name: env[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH") if name in env}
    return {"RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0", **own}


def start_host(
    settings: FeederSettings,
    folder: Path,
    *,
    stdout: Any = None,
    stderr: Any,
    own_session: bool = False,
    env: Mapping[str, str] = NOTHING,
) -> tuple[subprocess.Popen[bytes], int]:
    """Writes a feeder's settings to `folder`, and starts the feeder's host. Returns the host's process, and a
    descriptor that yields a line once the feeder serves. User code does not see Ray's token unless `env` contains it.
    Raises OSError."""
    path = folder / "settings.json"
    dump(settings, path)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", HOST_MODULE, "--settings", path, "--ready-fd", str(writer)],
            stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, pass_fds=(writer,), start_new_session=own_session,
            env={"PYTHONHASHSEED": "0", **without_ray(os.environ), **env},  # sets iterate in the same order everywhere
        )  # fmt: skip
    finally:
        os.close(writer)
    return process, reader


def _session_and_name(pid: int) -> tuple[int, str] | None:
    """Returns the session and name of a process; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    state, _, _, session = stat[stat.rindex(")") + 2 :].split()[:4]
    return None if state in "ZX" else (int(session), name)
