"""The supervisor's interface to whatever starts feeders.

A running feeder reports to the supervisor on its own. A provider does what no feeder can: start one, end one, and
explain why one does not come up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.settings import FeederSettings, SupervisorSettings
from dataloaderjob.core.supervision import Cause, name_of

RAY, LOCAL, REMOTE = "ray", "local", "remote"
NAMES = (RAY, LOCAL)
"""Providers of one machine. The head's pod uses REMOTE."""
LEASE_S = 20.0
"""Time for which feeders on a Ray cluster that outlives the job serve without a supervisor. A supervisor that is
restarted at once takes 5 s to adopt them, and 15 s on a busy machine."""


class ProviderLost(DataLoaderJobError):
    """This process can use its provider no longer. Another supervisor may, and adopts the feeders."""


class Why(NamedTuple):
    """The reason why one feeder is still awaited."""

    feeder: int
    """Its number."""
    cause: Cause
    text: str
    dead: bool = False
    """True if it will not come up unless it is placed again."""
    host: str = ""
    """Address of the node that is to run it; empty if that is not known."""


class Provider(Protocol):
    """A way to run feeders. Only the supervisor's main thread calls it."""

    explain_after_s: float
    """Time for which a feeder may be awaited before `late` is called for it."""

    @property
    def session(self) -> str:
        """Name of the session in which feeders run, once connected: a feeder of another session is a guest."""

    @property
    def in_force(self) -> dict[str, Any]:
        """Version and settings of Ray, once connected; empty without Ray."""

    def connect(self) -> None:
        """Connects to whatever starts feeders. Raises ServiceError if that fails."""

    def found(self) -> list[int]:
        """Returns the numbers of the feeders that this or an earlier supervisor placed and that have not ended.

        Raises ServiceError if this cannot currently be determined.
        """

    def place(self, index: int, num_feeders: int) -> None:
        """Asks for a feeder. Raises ServiceError if it is refused."""

    def kill(self, index: int) -> None:
        """Asks for a feeder's end for good; `found` tells once it is effective. Does nothing if no such feeder
        exists, or not yet."""

    def late(self, indices: Sequence[int], *, taken: int, now: float) -> list[Why]:
        """Returns why these feeders, in order, have not come up. `taken`: number of places that all others take.

        Raises ServiceError if this cannot currently be determined.
        """

    def out_of_memory(self) -> Mapping[str, str]:
        """Returns addresses of nodes where this provider recently killed feeders for lack of memory, each with a
        message for users. Raises ServiceError if this cannot currently be determined."""


def feeder_settings(
    settings: SupervisorSettings, index: int, num_feeders: int, session: str
) -> FeederSettings:
    """Returns the settings of feeder `index`, except where it runs."""
    return FeederSettings(
        job=settings.job, name=name_of(index), session=session, index=index, num_feeders=num_feeders,
        key_path=settings.feeder_key_path or settings.key_path, blob_folder=settings.feeder_blob_folder,
        supervisor_host=settings.feeder_supervisor_host, supervisor_port=settings.port,
        bind_host=settings.feeder_bind_host, advertise_host=settings.feeder_advertise_host,
        memory_field=settings.memory_field, lease_s=LEASE_S if settings.ray_external else 0.0,
        tls_folder=settings.feeder_tls_folder,
    )  # fmt: skip
