"""The admission of trainers to a sidecar. It limits the number of processes, because they share the node's memory.
Except in attached pods, each rank has at most one live process."""

from __future__ import annotations

import dataclasses
import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass

from dataloaderjob.core.control import W_IDLE, Control
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.processes import alive
from dataloaderjob.core.settings import LoaderSettings, SidecarSettings

EXTRA_PROCESSES = 8
"""Maximum number of processes that may attach to a private service beyond the number for which it was started.
Together, these extra processes share the memory of one process."""
MAX_LISTED = 8


@dataclass(slots=True, eq=False)
class ReceiverProcess:
    """The parent's record of a running receiver."""

    rank: str
    trainer_pid: int
    process: str
    """The name that the trainer process has chosen for itself. A pid is not enough, because processes in different
    containers can have the same pid."""
    pidfd: int
    pid: int
    channel: socket.socket
    control: Control
    untold: bool = False
    """True if the list of feeders must be sent to the receiver again, for example because its channel was full."""


class Admission:
    """The rules for admitting trainers, based on the receivers that are running."""

    def __init__(
        self,
        settings: SidecarSettings,
        receivers: dict[int, ReceiverProcess],
        end: Callable[[ReceiverProcess], None],
    ) -> None:
        """`receivers`: the running receivers, by pid. The parent updates this dict. `end`: kills a receiver and waits
        until it has exited."""
        self._settings, self._receivers, self._end = settings, receivers, end

    def claim(self, rank: str, pid: int, process: str) -> str:
        """Returns the name under which the rank is shown. Raises RemoteProtocolError if another live process holds the
        rank and cannot give way."""
        if self._settings.awaits_feeders:
            return self._claim_attached(rank, pid, process)
        for receiver in list(self._receivers.values()):
            if receiver.rank != rank:
                continue
            if alive(receiver.pidfd) and receiver.process != process and not self._may_give_way(receiver):
                raise RemoteProtocolError(
                    f"rank {rank} is taken by the live process {receiver.trainer_pid}, so process {pid} "
                    "cannot use it: give each process its own RANK, or end the other process"
                )
            self._end(receiver)
        return rank

    def _claim_attached(self, rank: str, pid: int, process: str) -> str:
        for receiver in list(self._receivers.values()):
            if receiver.process == process or not alive(receiver.pidfd):
                self._end(receiver)
        taken = {receiver.rank for receiver in self._receivers.values()}
        names = itertools.chain((rank, f"{rank}-{pid}"), (f"{rank}-{pid}-{n}" for n in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def _may_give_way(self, receiver: ReceiverProcess) -> bool:
        """Returns True if the receiver may be ended, because its trainer uses a private service and has no loader in
        use. The trainer attaches again when it needs a loader."""
        return self._settings.private and bool(receiver.control.words[W_IDLE])

    def _running(self) -> int:
        return sum(alive(receiver.pidfd) for receiver in self._receivers.values())

    def share(self) -> LoaderSettings:
        """Returns the settings for one more receiver, with its share of the node's shared memory. Raises
        RemoteProtocolError if no more processes are admitted."""
        settings = self._settings
        if self._running() >= settings.processes:
            for receiver in [r for r in self._receivers.values() if self._may_give_way(r)]:
                self._end(receiver)
        if (running := self._running()) < settings.processes:
            return settings
        if settings.awaits_feeders:
            raise RemoteProtocolError(self._full())
        if not settings.private:
            raise RemoteProtocolError(
                f"this sidecar shares its memory among {settings.processes} trainer processes, and all "
                "of them are attached: set spec.trainers.job.processesPerPod to the number of processes in "
                "each pod"
            )
        if running >= settings.processes + EXTRA_PROCESSES:
            raise RemoteProtocolError(
                f"{running} processes use the service of this launch, which was started for "
                f"{settings.processes}: set LOCAL_WORLD_SIZE to their number, as torchrun does"
            )
        share = settings.limit_nbytes // EXTRA_PROCESSES
        return dataclasses.replace(settings, processes=1, shared_memory_nbytes=share, pool_nbytes=None)

    def _full(self) -> str:
        held = [
            f"rank {r.rank} (process {r.trainer_pid})" for r in self._receivers.values() if alive(r.pidfd)
        ]
        more = f" and {len(held) - MAX_LISTED} more" if len(held) > MAX_LISTED else ""
        if self._settings.processes == 1:
            most = "one trainer process at a time, and one is already attached"
        else:
            most = (
                f"{self._settings.processes} trainer processes at a time, and all of them are already "
                "attached"
            )
        return (
            f"this job serves {most}: {', '.join(held[:MAX_LISTED])}{more}; end one of them, or raise "
            "spec.trainers.attach.processesPerPod"
        )
