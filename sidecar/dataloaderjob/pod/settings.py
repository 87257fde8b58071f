"""Settings of the main processes of head and feeder pods: what the operator writes into the job's ConfigMap.

The fields without defaults are those of the operator's `objects/settings.py`; each process reads its file
once, with `core.settings.load`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.settings import RayTuning

ADDRESS_VARIABLE = "POD_IP"
"""The address of the pod; without it, one machine alone is meant."""
TEMP_DIR = "/tmp/ray"  # noqa: S108  in a pod, /tmp is a volume of its own
REMEDY = "give temp_dir a shorter path"
PLAIN = "--log-color=false"
ANY_PORTS = ("--min-worker-port=0", "--max-worker-port=0")
"""Workers listen at any free port. Ray's own range, 10002 to 19999, may have the head's port in it, and where
raylets share an address they meet there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """The head's pod: GCS, a raylet without feeders, the supervisor."""

    job: str
    """Unique name of the job (namespace/name/uid)."""
    key_path: str
    """File with the job's key, at the same path in the feeders' pods unless `feeder_key_path` says where."""
    token_path: str
    """File with the token of the job's Ray."""
    host: str
    """The name of a Service, by which feeders find this pod."""
    gcs_port: int
    supervisor_port: int
    num_feeders: int
    tuning: RayTuning = field(default_factory=RayTuning)
    feeder_key_path: str | None = None
    temp_dir: str = TEMP_DIR
    """Ray's state and ours; at most 40 bytes, for the sake of Unix sockets. What an earlier container left
    there is removed."""
    up_timeout_s: float = 120.0
    grace_s: float = 2.0
    """Time for Ray's processes at the end: the raylet says good-bye, no other has anything to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeederPodSettings:
    """A pod of feeders: a raylet that has room for `processes` of them."""

    job: str
    token_path: str
    head: str
    """host:port of the head's GCS."""
    processes: int
    tuning: RayTuning = field(default_factory=RayTuning)
    temp_dir: str = TEMP_DIR
    """The same path as the head's."""
    head_timeout_s: float = 600.0
    """The head's image may still be on its way to its node."""
    progress_every_s: float = 10.0
    join_timeout_s: float = 120.0
    grace_s: float = 2.0


def split_address(address: str) -> tuple[str, int]:
    """Raises InputError unless it is host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"the head's address is needed as host:port, found {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def read_token(path: str) -> str:
    """Raises InputError when the token of the job's Ray is not there: Ray itself would say less."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, ValueError) as exc:
        raise InputError(f"the token of the job's Ray is needed in {path}: {exc}") from exc
    if not token:
        raise InputError(f"the token of the job's Ray is needed in {path}, the file is empty")
    return token
