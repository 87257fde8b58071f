"""Settings of the sidecar process: one frozen dataclass, read once in `__main__`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dataloaderjob.core import ipc
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.settings import LoaderSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarSettings(LoaderSettings):
    """What the manifest and the runner fix for one sidecar."""

    job: str
    """Unique name of the job (namespace/name/uid on a cluster)."""
    socket: str
    """Path of the Unix socket that trainers connect to; at most 107 bytes."""
    key_path: str
    """File with the job's key, shared with feeders and supervisor."""
    blobs: str
    """Folder of user code and data; trainers write it, so it is shared with them."""
    supervisor_host: str | None = None
    """None: with a fixed list of feeders."""
    supervisor_port: int = 0
    feeders: Sequence[tuple[str, str, str, int]] = ()
    """Fixed feeders (name, instance, host, port), used when there is no supervisor."""
    private: bool = False
    """Trainers of this user's only: on a cluster those of a group may come."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """Port of /metrics and /healthz; 0 for any, None for none."""

    def check(self) -> None:
        """Raises InputError for what cannot work, before anything is created."""
        if len(self.socket.encode()) > ipc.MAX_PATH_NBYTES:
            raise InputError(
                f"a Unix socket's path may have {ipc.MAX_PATH_NBYTES} bytes, {self.socket!r} has "
                f"{len(self.socket.encode())}: choose a shorter folder (TMPDIR, or DATALOADERJOB_DIR)"
            )
        if not Path(self.socket).parent.is_dir():
            raise InputError(f"the folder of the socket {self.socket!r} does not exist: create it first")
        if self.pool_nbytes is not None and self.pool_nbytes > self.limit_nbytes:
            raise InputError(
                f"a pool of {self.pool_nbytes} bytes was asked for, the limit of one pool is {self.limit_nbytes} "
                f"({self.shared_memory_nbytes} for {self.processes} processes): raise spec.sidecar.sharedMemory "
                "or lower spec.sidecar.poolSize"
            )
        available = memory_limit()
        if self.shared_memory_nbytes > available:
            raise InputError(
                f"shared memory of {self.shared_memory_nbytes} bytes was asked for, this container may use "
                f"{available}: raise the memory limit of the sidecar or lower spec.sidecar.sharedMemory"
            )


def memory_limit() -> int:
    """Bytes this process may use: the smallest of the machine's memory and the cgroup's limit.

    A memfd beyond the cgroup's limit ends in SIGKILL, not in an error, so it is read before anything
    is touched.
    """
    limits = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
