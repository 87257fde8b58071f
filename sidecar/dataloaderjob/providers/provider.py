"""The supervisor's interface to the component that starts feeders, ends them, and explains why a feeder does not come
up. Running feeders report to the supervisor directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.settings import FeederSettings, SupervisorSettings
from dataloaderjob.core.supervision import Cause, name_of

RAY, LOCAL, REMOTE = "ray", "local", "remote"
NAMES = (RAY, LOCAL)
"""Providers that a run on one machine can use. The head's pod uses REMOTE."""
LEASE_S = 20.0
"""Seconds for which feeders on an existing Ray cluster serve without a supervisor. A restarted supervisor takes 5 s to
adopt them, or 15 s on a busy machine."""


class ProviderLost(DataLoaderJobError):
    """This process can no longer use its provider. A restarted supervisor may be able to use it, and then adopts the
    feeders."""


class Why(NamedTuple):
    """The reason why one feeder is still awaited."""

    feeder: int
    """The feeder's number."""
    cause: Cause
    text: str
    dead: bool = False
    """True if the feeder will not come up unless it is placed again."""
    host: str = ""
    """Address of the node that should run the feeder; empty if unknown."""


class Provider(Protocol):
    """A way to run feeders. Only the supervisor's main thread calls it."""

    explain_after_s: float
    """Seconds without a report from a feeder after which `late` is called for that feeder."""

    @property
    def session(self) -> str:
        """Name of the session in which feeders run, once connected. A feeder of another session is a guest."""

    @property
    def in_force(self) -> dict[str, Any]:
        """Version and settings of Ray, once connected; empty without Ray."""

    def connect(self) -> None:
        """Connects to the component that starts feeders. Raises ServiceError if that fails."""

    def found(self) -> list[int]:
        """Returns the numbers of the feeders that this or an earlier supervisor placed and that have not ended.

        Raises ServiceError if this cannot currently be determined.
        """

    def place(self, index: int, num_feeders: int, own_key: str) -> None:
        """Requests a feeder. `own_key`: the key derived from the feeder's name, in hexadecimal. Raises ServiceError if
        the request is refused."""

    def kill(self, index: int) -> None:
        """Requests the permanent end of a feeder. Once the feeder has ended, `found` omits it. Does nothing if the
        feeder does not exist."""

    def late(self, indices: Sequence[int], *, taken: int, now: float) -> list[Why]:
        """Returns the reasons why these feeders have not come up. `taken`: number of places that all other feeders
        occupy.

        Raises ServiceError if this cannot currently be determined.
        """

    def out_of_memory(self) -> Mapping[str, str]:
        """Returns addresses of nodes where this provider recently killed feeders for lack of memory, each with a
        message for users. Raises ServiceError if this cannot currently be determined."""


def feeder_settings(
    settings: SupervisorSettings, index: int, num_feeders: int, session: str, own_key: str
) -> FeederSettings:
    """Returns the settings of feeder `index`, except those that depend on the feeder's node."""
    return FeederSettings(
        job=settings.job, name=name_of(index), session=session, index=index, num_feeders=num_feeders,
        key_path=settings.feeder_key_path or settings.key_path, blob_folder=settings.feeder_blob_folder,
        supervisor_host=settings.feeder_supervisor_host, supervisor_port=settings.port,
        bind_host=settings.feeder_bind_host, advertise_host=settings.feeder_advertise_host,
        memory_field=settings.memory_field, lease_s=LEASE_S if settings.ray_external else 0.0,
        tls_folder=settings.feeder_tls_folder, own_key=own_key,
    )  # fmt: skip
