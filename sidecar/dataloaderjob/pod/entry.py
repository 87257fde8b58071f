"""The common part of the pods' main processes: settings, signals, exit codes, and the termination of everything that
they start.

`Restarts` decides whether and when to restart a process (pure). `Kept` is a process that is restarted.

The operator's `objects/settings.py` writes the settings into the job's ConfigMap, and sets at least the fields without
defaults. Each process reads its file once, with `core.settings.load`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from dataloaderjob.core.errors import DataLoaderJobError, InputError, ServiceError
from dataloaderjob.core.logs import log_lines
from dataloaderjob.core.processes import CRASH_WINDOW_S, MAX_CRASHES, Crashes, restart_wait_s
from dataloaderjob.core.settings import LINK_FOLDER, NODE_FOLDER, TEMP_DIR, RayTasks, RayTuning, load
from dataloaderjob.core.sockets import parse_address
from dataloaderjob.core.supervision import EXIT_RAY_REFUSED, EXITS_RAY
from dataloaderjob.pod import reaping
from dataloaderjob.pod.reaping import SIGNALS, reap
from dataloaderjob.providers.ray.node import NO_TASKS, RayNode, without_ray

log = logging.getLogger(__name__)
S = TypeVar("S")

_RAYS = ("session_*", "ray_current_cluster")
POLL_S = 0.05
MAX_RAY_EXITS = 3
"""The pod gives up after this number of consecutive exits because of Ray, even if Ray seems to be alive."""
TERMINATION_LOG = Path("/dev/termination-log")
"""File whose text the kubelet reports as a container's last message. If the file is empty, the kubelet reports the last
lines of the output. Ray's processes write to the output as they end."""
EXIT_FAILED = 1
KEPT_GRACE_S = 2.0
ADDRESS_VARIABLE = "POD_IP"
"""Environment variable with the pod's address. If it is not set, everything runs on one machine."""
PLAIN = "--log-color=false"
ANY_PORTS = ("--min-worker-port=0", "--max-worker-port=0")
"""Options that make workers listen on any free port. Ray's default range, 10002 to 19999, may contain the head's port.
Raylets with the same address would also compete for ports."""


class Stopped(Exception):
    """SIGTERM or SIGINT arrived, so the process unwinds and ends."""


class Refused(ServiceError):
    """An existing Ray cluster has mismatched versions. A fresh container would not help."""


class Watch:
    """The main thread's waits, which signals interrupt. A process has one instance."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)

    def wait(self, timeout_s: float | None, fds: Iterable[int] = ()) -> set[int]:
        """Waits until one of `fds` is readable, at most for `timeout_s`. Returns the readable ones. A pidfd is readable
        once its process has ended.

        Raises Stopped as soon as a signal has arrived, and on every call after that.
        """
        ready = set(select.select([self._reader, *fds], [], [], timeout_s)[0])
        if self._reader in ready:
            raise Stopped
        return ready


def ray_node(
    settings: HeadSettings | FeederPodSettings,
    vital: Sequence[str],
    resources: Mapping[str, float] | None = None,
    tasks: RayTasks = NO_TASKS,
) -> RayNode:
    """Returns this pod's node of the Ray cluster, which is not launched yet. Raises InputError for settings that cannot
    work."""
    token = None
    if settings.token_path is not None:
        read_token(settings.token_path)
        token = Path(settings.token_path)
    return RayNode(
        Path(settings.temp_dir), token_path=token, vital=vital, tuning=settings.tuning,
        resources=resources, tasks=tasks, host=os.environ.get(ADDRESS_VARIABLE) or "127.0.0.1",
        remedy="set temp_dir to a shorter path",
    )  # fmt: skip


def check_ray(wanted: str | None) -> None:
    """Raises InputError unless this image has the Ray version that the manifest requests. If the manifest requests
    2.56, any 2.56.x is accepted."""
    installed = importlib.metadata.version("ray")
    if wanted is not None and not f"{installed}.".startswith(f"{wanted}."):
        raise InputError(
            f"spec.ray.managed.version is {wanted}, but this image has Ray {installed}: use an image with "
            "that version, or change spec.ray.managed.version"
        )


def node_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns a container's environment for Ray's processes. Among Ray's variables, the result keeps only configuration
    flags, such as RAY_memory_usage_threshold. This package sets the other variables."""
    flags = {name for name in environment if name.startswith("RAY_") and name[4:5].islower()}
    if others := sorted({name for name in environment if name.startswith("RAY_")} - flags):
        log.warning("not passed on to Ray, because dataloaderjob sets it up: %s", ", ".join(others))
    return {**without_ray(environment), **{name: environment[name] for name in flags}}


def fresh_folder(temp_dir: Path) -> Path:
    """Creates this package's own, empty folder below `temp_dir`. Removes an earlier container's leftovers from the
    volume."""
    for path in (*(p for pattern in _RAYS for p in temp_dir.glob(pattern)), temp_dir / NODE_FOLDER):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
    folder = temp_dir / NODE_FOLDER
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    return folder


def await_started(
    node: RayNode, watch: Watch, timeout_s: float, what: str, *, check: Callable[[], None] = lambda: None
) -> dict[str, int]:
    """Waits until `ray start` has succeeded. Returns the pidfds of the node's vital processes.

    Raises ServiceError if `ray start` failed or is late. Also raises Stopped, and any error that `check` raises. Ray's
    own messages precede the error in this process's output.
    """
    deadline = time.monotonic() + timeout_s
    while (code := node.start_code()) is None:
        if time.monotonic() > deadline:
            raise ServiceError(f"{what} did not start within {timeout_s:.0f} s: see Ray's output above")
        check()
        watch.wait(POLL_S)
    if code != 0:
        raise ServiceError(
            f"{what} could not be started, because `ray start` ended with code {code}: see its output above"
        )
    if not node.alive():
        raise ServiceError(f"{what} ended at once; processes left: {sorted(node.pids().values())}")
    return node.vital_pidfds()


class Restarts:
    """The policy that decides when to restart a process of this pod."""

    def __init__(self, what: str, *, max_ray_exits: int | None = MAX_RAY_EXITS) -> None:
        """`max_ray_exits`: None if Ray is in another container, which the kubelet restarts."""
        self.what, self._crashes, self._max_ray_exits = what, Crashes(), max_ray_exits
        self._ray_exits = 0

    def ended(self, code: int, now: float) -> float:
        """Records that the process ended. Returns the seconds to wait before the restart, which are 0 the first time,
        regardless of the exit code. Raises ServiceError if another start would be useless."""
        crashes = self._crashes.add(now)
        self._ray_exits = self._ray_exits + 1 if code in EXITS_RAY else 0
        if self._max_ray_exits is not None and self._ray_exits >= self._max_ray_exits:
            why = f"{self._ray_exits} times because it cannot work with Ray"
        elif crashes > MAX_CRASHES:
            why = f"{crashes} times within {CRASH_WINDOW_S:.0f} s"
        else:
            return restart_wait_s(crashes)
        raise ServiceError(f"{self.what} ended {why}: see its output above")


class Kept:
    """A process of this package that is restarted whenever it ends. It shares this process's output."""

    def __init__(self, module: str, settings: Path, env: Mapping[str, str], restarts: Restarts) -> None:
        """`settings`: the file that the process reads."""
        self._module, self._settings, self._env = module, settings, dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = restarts

    def run(self, wait: Callable[[float | None, Sequence[int]], object]) -> NoReturn:
        """Keeps the process running. `wait` waits for a time, or until one of the given descriptors is readable. Raises
        whatever `wait` raises, and ServiceError if another start would be useless."""
        while True:
            code = self._run_once(wait)
            delay_s = self._restarts.ended(code, time.monotonic())
            log.warning("%s ended with code %d; restarting it", self._restarts.what, code)
            wait(delay_s, ())

    def _run_once(self, wait: Callable[[float | None, Sequence[int]], object]) -> int:
        """Runs the process once. Returns its exit code."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module, "--settings", self._settings],
            env=self._env, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        pidfd = os.pidfd_open(self._process.pid)
        try:
            wait(None, [pidfd])
        finally:
            os.close(pidfd)
        return self._process.wait()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KEPT_GRACE_S)
            self._process.kill()
            self._process.wait()


class PodPart(Protocol):
    """A pod's work. The main thread calls `run`, then `close`."""

    def run(self) -> None:
        """Serves as long as it can. Raises OSError and Stopped. Raises ServiceError if it cannot continue."""

    def close(self) -> None:
        """Ends everything that this part started."""


def serve(kind: type[S], make: Callable[[S, Watch], PodPart], *, name: str) -> int:
    """Runs a pod's main process. Returns 0 after SIGTERM or SIGINT; otherwise, returns EXIT_FAILED or EXIT_RAY_REFUSED,
    and the kubelet restarts the container."""
    parser = argparse.ArgumentParser(description=f"the main process of a pod: {name}")
    parser.add_argument("--settings", type=Path, required=True, help=f"JSON file of {kind.__name__}")
    path = parser.parse_args().settings
    log_lines(f"{name}: %(levelname)s %(message)s")
    return reap(lambda: _serve(kind, make, path)) if os.getpid() == 1 else _serve(kind, make, path)


def _serve(kind: type[S], make: Callable[[S, Watch], PodPart], path: Path) -> int:
    watch = Watch()
    try:
        part = make(load(kind, path), watch)
        try:
            part.run()
        finally:
            part.close()
    except Stopped:
        log.info("ended as requested")
        return 0
    except (DataLoaderJobError, OSError) as exc:
        log.error("%s", exc)
        if TERMINATION_LOG.exists():
            with contextlib.suppress(OSError):
                TERMINATION_LOG.write_text(f"{exc}\n")
        if isinstance(exc, Refused):
            return EXIT_RAY_REFUSED
    return EXIT_FAILED


def wait_beside(
    node: RayNode, watch: Watch, vital: Mapping[str, int], timeout_s: float | None, others: Sequence[int] = ()
) -> None:
    """Waits until one of `others` is readable, at most for `timeout_s`; None means no limit. Raises Stopped. Raises
    ServiceError if one of the node's vital processes ended."""
    ready = watch.wait(timeout_s, [*vital.values(), *others])
    if gone := [name for name, pidfd in vital.items() if pidfd in ready]:
        raise ended(node, gone)


def ended(node: RayNode, names: Iterable[str]) -> ServiceError:
    """Returns the error for a node whose vital processes `names` have ended. It describes how each one ended."""
    told = " and ".join(f"{name} {reaping.how_ended(node.pid_of(name))}" for name in names)
    return ServiceError(f"{told}: this container cannot continue, but a fresh one can")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalRay:
    """The existing Ray cluster that a job uses. By default, there is none, and the head pod starts its own."""

    address: str = ""
    """host:port of the cluster's GCS; empty if there is no such cluster."""
    feeder_resources: Mapping[str, float] = field(default_factory=dict)
    """Resources of one feeder, keyed by Ray's names."""
    feeder_env: Mapping[str, str] = field(default_factory=dict)
    """The manifest's variables for user code."""
    raylet_port: int = 0
    """Port on which the pod's raylet listens, for probes; 0 for any free port."""
    wait_timeout_s: float = 60.0
    """Maximum wait in seconds until the GCS accepts connections. After that, the container ends with a message that
    names the address."""
    join_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """The settings of the head's pod. Both of its containers read them: Ray's and the supervisor's."""

    job: str
    """Unique name of the job (namespace/name/uid)."""
    key_path: str
    """File with the job's key, in the supervisor's container only. Feeders' pods have the feeders' key at this path,
    unless `feeder_key_path` is set."""
    token_path: str | None
    """File with Ray's token, in Ray's container only; None for an existing Ray cluster without a token."""
    link_folder: str = LINK_FOLDER
    """Folder that both containers share, for the socket through which the supervisor reaches Ray."""
    host: str
    """The name of the Service through which feeders find this pod."""
    gcs_port: int
    supervisor_port: int
    num_feeders: int
    """The number of feeders if there is no `count_path`."""
    count_path: str | None = None
    """File with the current number of feeders. The other settings stay as they were when the pod was created."""
    tuning: RayTuning = field(default_factory=RayTuning)
    ray_version: str | None = None
    """The version of Ray that the image must have; None for any version."""
    feeder_key_path: str | None = None
    """File with the feeders' key, in the feeders' pods. On an existing Ray cluster, the file is in Ray's container
    instead, and feeders receive the key as an argument."""
    external: ExternalRay = field(default_factory=ExternalRay)
    temp_dir: str = TEMP_DIR
    """Folder for the state of Ray and of this package. Its path may have at most 40 bytes, because of Unix sockets."""
    up_timeout_s: float = 120.0
    grace_s: float = 2.0
    """Seconds between SIGTERM and SIGKILL for Ray's processes. The raylet deregisters; the others have nothing to
    save."""
    tls_folder: str = ""
    """Folder with the supervisor's certificates or, in feeders' pods, with the feeders' certificates (`core.tls`);
    empty without TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederPodSettings:
    """The settings of a pod of feeders: a raylet with room for `processes` feeders."""

    job: str
    token_path: str
    head: str
    """host:port of the head's GCS."""
    processes: int
    tasks: RayTasks = field(default_factory=RayTasks)
    tuning: RayTuning = field(default_factory=RayTuning)
    temp_dir: str = TEMP_DIR
    """The same path as the head's."""
    head_timeout_s: float = 600.0
    """Maximum wait in seconds for the head, whose node may still be pulling the image."""
    progress_every_s: float = 10.0
    join_timeout_s: float = 120.0
    patience_s: float = 10.0
    """Seconds without a feeder after which the pod starts a trial feeder. If the trial feeder serves, the pod is
    ready."""
    trial_timeout_s: float = 300.0
    grace_s: float = 2.0


def read_count(count_path: str | None, otherwise: int) -> int:
    """Returns the number of feeders that the operator wants now; `otherwise` if there is no file. Raises InputError."""
    if count_path is None:
        return otherwise
    try:
        return int(Path(count_path).read_text())
    except (OSError, ValueError) as exc:
        raise InputError(f"cannot read the number of feeders from {count_path}: {exc}") from exc


def split_address(address: str) -> tuple[str, int]:
    """Splits host:port. Raises InputError for anything else."""
    try:
        return parse_address(address)
    except ValueError as exc:
        raise InputError(f"the head's address must be host:port, but is {address!r}") from exc


def read_token(path: str) -> str:
    """Returns the token of the job's Ray cluster. Raises InputError if it is missing, because Ray's own error would be
    vaguer."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, ValueError) as exc:
        raise InputError(f"cannot read the token of the job's Ray cluster from {path}: {exc}") from exc
    if not token:
        raise InputError(f"the token of the job's Ray cluster must be in {path}, but the file is empty")
    return token
