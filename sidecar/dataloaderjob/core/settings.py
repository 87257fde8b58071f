"""Settings of processes. The process that starts another one passes the settings in a JSON file.

Each process reads its file once, in its `__main__`. The writer may be of another version, for example if the operator
is newer than a job's images. An unknown key is ignored and logged, and a missing key gets its default. Therefore, no
key is ever removed or given another meaning, and each new key has a default.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from dataloaderjob.core import folders, ipc
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.memory import memory_limit

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

T = TypeVar("T")

NODE_BLOBS = "blobs"
"""Folder within a feeder pod's own folder (NODE_FOLDER_VARIABLE). The pod's feeders keep their blobs there, whatever
folder the supervisor names."""
NODE_OUTPUT = "feeders"
"""Socket in the pod's own folder over which the feeders send their output and report that they serve."""
NODE_READY = "ready"
"""File in the pod's own folder that exists while the pod is ready."""
TEMP_DIR = "/tmp/ray"  # noqa: S108  in a pod, /tmp is a volume of its own
"""Folder for the state of Ray and of this package in a pod."""
LINK_FOLDER = "/run/dataloaderjob/link"
"""Folder that the two containers of a head's pod share. It contains only a socket."""
NODE_FOLDER = "node"
"""Folder below TEMP_DIR for this package's files, separate from Ray's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTuning:
    """Ray's own timeouts. GCS and raylets read them from their environment when they start. On every node, the head's
    config takes precedence."""

    worker_register_timeout_s: int = 120
    """Time after which a raylet kills a worker process that has not reported. Ray's default of 60 s is too short for
    slow imports on a loaded node. If a worker takes longer than this to start, ray.init hangs."""
    health_check_initial_delay_s: float = 5.0
    health_check_period_s: float = 3.0
    health_check_timeout_s: float = 10.0
    health_check_failure_threshold: int = 5
    """Number of consecutive failed checks after which a node counts as dead (formerly num_heartbeats_timeout)."""
    gcs_reconnect_timeout_s: int = 60
    """Time for which raylets and workers outlive their GCS."""

    def config(self) -> dict[str, int]:
        """Returns the same settings by Ray's names. A head keeps them in this form, and passes them to every node that
        joins."""
        return {
            "worker_register_timeout_seconds": self.worker_register_timeout_s,
            "health_check_initial_delay_ms": round(self.health_check_initial_delay_s * 1000),
            "health_check_period_ms": round(self.health_check_period_s * 1000),
            "health_check_timeout_ms": round(self.health_check_timeout_s * 1000),
            "health_check_failure_threshold": self.health_check_failure_threshold,
            "gcs_rpc_server_reconnect_timeout_s": self.gcs_reconnect_timeout_s,
        }

    def env(self) -> dict[str, str]:
        """Returns environment variables that apply the settings from the start of a process, on the head and on
        nodes."""
        return {f"RAY_{name}": str(value) for name, value in self.config().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTasks:
    """Resources that a node with feeders leaves for Ray tasks of user code, such as those of Ray Data."""

    cpus: int = 0
    """CPUs for tasks. If this is 0, user code cannot reach Ray."""
    object_store_nbytes: int = 80 * 1024**2
    """Size of the object store. Ray's minimum is 75 MB. Without tasks, the object store stays empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """A manifest's settings for one sidecar's pools, the same on one machine and on a cluster. `SidecarSettings` adds
    those that depend on where the sidecar runs."""

    processes: int = 1
    """Number of trainer processes that share the memory limit."""
    shared_memory_nbytes: int = 2 * 1024**3
    """Shared memory for all pools of this sidecar, in bytes."""
    pool_nbytes: int | None = None
    """Size of each pool in bytes. None means (window + reserve) times the size of the first batch."""
    batch_deadline_s: float = 300.0
    progress_after_s: float = 30.0
    checksum: bool = False
    """True if the receiver verifies every body against its digest."""
    awaits_feeders: bool = False
    """True if another controller starts the trainers (`spec.trainers.attach`). Deadlines for batches then start with
    the first feeder, because a trainer attaches before feeders exist. Processes of different launches may have the same
    rank."""

    @property
    def limit_nbytes(self) -> int:
        """Shared memory, in bytes, that one pool may take in total."""
        return self.shared_memory_nbytes // self.processes


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSettings(LoaderSettings):
    """Settings of one sidecar, from the manifest and from the program that starts the sidecar."""

    job: str
    """Unique name of the job (namespace/name/uid on a cluster)."""
    socket: str
    """Path of the Unix socket that trainers connect to, at most 107 bytes long."""
    key_path: str
    """File with the sidecars' key (`core.keys`)."""
    blobs: str
    """Folder of user code and data, shared with the trainers, which write to it."""
    supervisor_host: str | None = None
    """Host of the supervisor, or None if the list of feeders is fixed."""
    supervisor_port: int = 0
    feeders: Sequence[tuple[str, str, str, int]] = ()
    """Fixed feeders (name, instance, host, port), used without a supervisor."""
    scratch: Mapping[str, int] = field(default_factory=dict)
    """Bytes available for user code and data in this pod and on feeders' nodes. The keys are the manifest fields that
    set these limits."""
    private: bool = False
    """True to admit only this user's trainers. False on a cluster, where trainers in the same group may also
    connect."""
    anyone: bool = False
    """True to admit trainers of any user, as in an attached pod. There, the sidecar cannot know the trainer's user and
    group, but it shares its folder only with the trainer's container."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """Port of /metrics and /healthz. 0 means any free port, and None means that they are not served."""
    ended: str = ""
    """The reason why the job has ended, for pods that outlive it. Empty while the job is running."""
    tls_folder: str = ""
    """Folder with the certificates of this sidecar (`core.tls`). Empty if connections do not use TLS."""

    def check(self) -> None:
        """Raises InputError if these settings cannot work, before anything is created."""
        if len(self.socket.encode()) > ipc.MAX_PATH_NBYTES:
            raise InputError(
                f"a Unix socket's path may have at most {ipc.MAX_PATH_NBYTES} bytes, but {self.socket!r} "
                f"has {len(self.socket.encode())}: choose a folder with a shorter path (TMPDIR, or "
                "DATALOADERJOB_DIR)"
            )
        if not Path(self.socket).parent.is_dir():
            raise InputError(f"the folder of the socket {self.socket!r} does not exist: create it first")
        if self.pool_nbytes is not None and self.pool_nbytes > self.limit_nbytes:
            raise InputError(
                f"a pool of {self.pool_nbytes} bytes was requested, but the limit of one pool is "
                f"{self.limit_nbytes} ({self.shared_memory_nbytes} for {self.processes} processes): raise "
                "spec.loader.memoryPerProcess or lower spec.loader.poolSize"
            )
        available = memory_limit()
        if self.shared_memory_nbytes > available:
            raise InputError(
                f"{self.shared_memory_nbytes} bytes of shared memory were requested, but this container "
                f"may use {available}: raise the sidecar's memory limit or lower "
                "spec.loader.memoryPerProcess"
            )


def reads_other_releases(cls: type[T]) -> type[T]:
    """Lets a dataclass read pickles from other releases. Ray keeps an actor's arguments as a pickle, in which a
    dataclass is a sequence of its fields.

    Therefore, fields are only ever appended. A pickle from an earlier release has fewer fields, and one from a later
    release has more. The decorator is applied to the finished class, because Python 3.11.2's `dataclass` overwrites a
    `__setstate__` in the class's body. Debian 12 has this version.
    """

    def set_state(self: T, state: Sequence[Any]) -> None:
        known = dataclasses.fields(self)  # type: ignore[arg-type]
        for field_, value in zip(known, state, strict=False):
            object.__setattr__(self, field_.name, value)
        for field_ in known[len(state) :]:
            object.__setattr__(self, field_.name, field_.default)

    cls.__setstate__ = set_state  # type: ignore[attr-defined]
    return cls


@reads_other_releases
@dataclass(frozen=True, slots=True, kw_only=True)
class FeederSettings:
    """Settings of one feeder process."""

    job: str
    name: str = "feeder-0"
    session: str = ""
    """Ray's name for the cluster that placed the feeder, or empty without Ray. The supervisor treats a feeder of
    another cluster as a guest."""
    index: int = 0
    """Number in the feeder's name. User code sees it as `get_worker_info().id`."""
    num_feeders: int = 1
    """Number of feeders of the job when this one was placed. User code sees it as `get_worker_info().num_workers`."""
    key_path: str
    """File with the feeders' key (`core.keys`)."""
    blob_folder: str
    """Folder shared by the feeders of one node."""
    supervisor_host: str | None = None
    """Host of the supervisor. None for a standalone feeder, which reports to nobody and finds all blobs in its
    folder."""
    supervisor_port: int = 0
    bind_host: str = "127.0.0.1"
    advertise_host: str | None = None
    """Host that receivers connect to. None means `bind_host`, or the node's address if the feeder is bound to all
    addresses."""
    port: int = 0
    node: str = ""
    """The provider's name for the node of the feeder, used in messages."""
    sweeps_blobs: bool = False
    """True if the folder belongs to this node alone. Blobs that no feeder has used for a long time are then removed."""
    shares_memory: bool = True
    """True if receivers on this machine copy batches out of this feeder's memory. False if they use TCP, like receivers
    on other machines."""
    max_ungranted: int = 2
    """Maximum number of built batches kept for one receiver that has no room for them."""
    max_idle_nbytes: int = 1 << 30
    """Maximum total size, in bytes as shipped, of loaded bundles without a session. The last one always stays
    loaded."""
    memory_field: str = ""
    """The manifest field that limits the feeder's memory. Empty if no field does."""
    lease_s: float = 0.0
    """Time without a supervisor after which the feeder exits. If this is 0, the feeder keeps serving, and waits for the
    next supervisor."""
    tls_folder: str = ""
    """Folder with the certificates of feeders (`core.tls`). Empty if connections do not use TLS."""
    own_key: str = field(default="", repr=False)
    """The key of the feeder's name (`core.keys`), as hexadecimal text. Empty for a standalone feeder, or if the
    supervisor has no such keys."""


@reads_other_releases
@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignNode:
    """Additional arguments for a feeder on a Ray node that was not started for the job."""

    key: bytes = b""
    """The feeders' key, which no file of that node contains."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The manifest's environment variables for user code."""
    tag: str = ""
    """Name of the job on that cluster: its Ray namespace, and part of the names that Ray shows for its feeders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """Settings of a job's supervisor, which runs next to the Ray head or the feeder host."""

    job: str
    key_path: str
    """File with the job's key."""
    blob_folder: str
    """The supervisor's own folder, with blobs that were uploaded for other nodes."""
    provider: str = "ray"
    """The provider that starts feeders: "ray", "local" or "remote" (`providers.provider`)."""
    ray_address: str = ""
    """host:port of the GCS, for the provider "ray"."""
    host_socket: str | None = None
    """Path of the feeder host's socket, for the provider "local"."""
    provider_socket: str | None = None
    """Path of the socket on which a provider in another process listens, for the provider "remote"."""
    num_feeders: int = 1
    """Number of feeders at the first start. A number that is set later is kept in `state_path`."""
    state_path: str
    """File in which a restarted supervisor finds the number of feeders."""
    bind_host: str = "127.0.0.1"
    port: int
    """Port of the supervisor. It never changes during the job, so that other processes find a restarted supervisor."""
    feeder_supervisor_host: str = "127.0.0.1"
    """Host at which feeders find this supervisor."""
    feeder_blob_folder: str
    feeder_key_path: str | None = None
    """Path of the feeders' key on their nodes, or None if it is the same as `key_path`."""
    feeder_bind_host: str = "127.0.0.1"
    feeder_advertise_host: str | None = None
    feeder_resources: dict[str, float] = field(default_factory=lambda: {"feeder": 1.0})
    """Ray resources that one feeder takes from its node: CPU, GPU, memory in bytes, and custom resources."""
    ready_timeout_s: float = 150.0
    """Time after which a feeder that has not reported is replaced. It should be longer than
    `worker_register_timeout_s`."""
    init_timeout_s: float = 60.0
    drain_timeout_s: float = 10.0
    """Time that an unwanted feeder has to finish its work."""
    worker_register_timeout_s: int = 120
    """The raylets' setting of this name, used in messages."""
    memory_field: str = ""
    """The manifest field that limits the feeders' memory. Empty if no field does."""
    ray_external: bool = False
    """True if the Ray cluster was not started for the job. Feeders then have a lease, and the supervisor sends them the
    key and environment variables."""
    ray_tag: str = ""
    """Unique name of the job among all jobs of that cluster. Empty means the job's own name."""
    feeder_env: Mapping[str, str] = field(default_factory=dict)
    """The manifest's environment variables for user code on that cluster."""
    tls_folder: str = ""
    """Folder with the certificates of the supervisor (`core.tls`). Empty if connections do not use TLS."""
    feeder_tls_folder: str = ""
    """Folder with the certificates of feeders, on their nodes."""


def dump(settings: Any, path: Path) -> None:
    """Writes a settings dataclass as JSON, atomically. Only this user may read the file."""
    folders.write(path, json.dumps(dataclasses.asdict(settings), indent=1).encode())


def load(kind: type[T], path: Path) -> T:
    """Reads settings that `dump` or an operator wrote. Raises an InputError that names the file and the missing
    fields."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as exc:
        raise InputError(f"cannot read settings for {kind.__name__} from {path}: {exc}") from exc
    unknown: list[str] = []
    made = _made(kind, found, path, unknown)
    if unknown:
        sys.stderr.write(
            f"settings for {kind.__name__} in {path} have fields that this version does not know, and that it "
            f"ignores: {', '.join(sorted(unknown))}\n"
        )
    return made


def _made(kind: type[T], found: Any, path: Path, unknown: list[str], inside: str = "") -> T:
    """Builds a dataclass, and any dataclasses in its fields, from a JSON object. Adds keys that the dataclass lacks to
    `unknown`. `inside` contains the enclosing keys."""
    if not isinstance(found, Mapping):
        raise InputError(f"settings for {kind.__name__} in {path} must be a JSON object")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown += [inside + name for name in found if name not in fields]
    needed = [
        n for n, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and n not in found
    ]  # fmt: skip
    if needed:
        raise InputError(
            f"settings for {kind.__name__} in {path} lack {', '.join(inside + name for name in needed)}: add them"
        )
    hints = get_type_hints(kind)
    known = {name: value for name, value in found.items() if name in fields}
    inner = {
        name: _made(hints[name], value, path, unknown, f"{inside}{name}.")
        for name, value in known.items()
        if dataclasses.is_dataclass(hints[name])
    }
    return kind(**{**known, **inner})


def read_credentials(folder: str) -> Credentials | None:
    """Reads the certificates of this process. Returns None if the job does not use TLS. Raises InputError."""
    if not folder:
        return None
    from dataloaderjob.core.credentials import Credentials  # imports `ssl`, which only TLS needs

    return Credentials(folder)


def read_own_key(settings: FeederSettings) -> bytes:
    """Returns the key with which a feeder reports to the supervisor. If a supervisor of an earlier release gave the
    feeder no key, this is the key of all feeders. Raises InputError."""
    return bytes.fromhex(settings.own_key) if settings.own_key else read_key(settings.key_path)


def read_key(path: str | Path) -> bytes:
    """Reads a key. Raises InputError if it is missing or too short."""
    try:
        key = Path(path).read_bytes()
    except OSError as exc:
        raise InputError(f"cannot read the job's key from {path}: {exc.strerror}") from exc
    if len(key) < 16:
        raise InputError(f"the job's key in {path} must have at least 16 bytes, but has {len(key)}")
    return key
