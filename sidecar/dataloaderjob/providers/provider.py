"""What the supervisor asks of whoever starts feeders, whichever it is.

A feeder that runs reports to the supervisor by itself; a provider is asked for what no feeder can say: to start
one, to end one, and why one does not come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dataloaderjob.core.settings import FeederSettings, SupervisorSettings
from dataloaderjob.core.supervision import Cause, name_of

RAY, LOCAL = "ray", "local"
NAMES = (RAY, LOCAL)


class Why(NamedTuple):
    """The reason why one feeder is still awaited."""

    feeder: int
    """Its number."""
    cause: Cause
    text: str
    dead: bool = False
    """It does not come unless it is placed again."""
    host: str = ""
    """Address of the node where it is to be; empty if that is not known."""


class Provider(Protocol):
    """Called by the supervisor's main thread alone."""

    explain_after_s: float
    """So long a feeder may be awaited before `late` is asked for it."""

    @property
    def session(self) -> str:
        """Name of what feeders run in, once connected: a feeder of another session is a guest."""

    @property
    def in_force(self) -> dict[str, Any]:
        """Version and settings of Ray, once connected; empty without Ray."""

    def connect(self) -> None:
        """Raises ServiceError when nobody can be asked for feeders."""

    def found(self) -> list[int]:
        """Numbers of the feeders that an earlier supervisor placed."""

    def place(self, index: int, num_feeders: int) -> None:
        """Asks for a feeder. Raises ServiceError when it is refused."""

    def kill(self, index: int) -> None:
        """Ends a feeder for good. One that is not there, or not yet, is fine."""

    def late(self, indices: Sequence[int], *, taken: int, now: float) -> list[Why]:
        """Why these feeders, in order, have not come. `taken`: places of all others that are there.

        Raises ServiceError when that cannot be asked now.
        """

    def out_of_memory(self) -> Mapping[str, str]:
        """Nodes, by their addresses, where this provider killed feeders for want of memory of late, and what to say of
        it. Raises ServiceError when that cannot be asked now."""


def feeder_settings(
    settings: SupervisorSettings, index: int, num_feeders: int, session: str
) -> FeederSettings:
    """What feeder `index` is told; all of it but where it runs."""
    return FeederSettings(
        job=settings.job, name=name_of(index), session=session, index=index, num_feeders=num_feeders,
        key_path=settings.feeder_key_path or settings.key_path, blob_folder=settings.feeder_blob_folder,
        supervisor_host=settings.feeder_supervisor_host, supervisor_port=settings.port,
        bind_host=settings.feeder_bind_host, advertise_host=settings.feeder_advertise_host,
        memory_field=settings.memory_field,
    )  # fmt: skip
