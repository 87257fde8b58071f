"""The private service of one launch, run by `local.__main__` after the feeder host is forked.

The first rank starts the service, detached, for all local ranks (`trainer.session.private`). The sidecar's socket is
DIR/s. If the service cannot serve, DIR/failed contains the reason. The service ends after its last client and removes
DIR. Alternatively, it stays for a while for the next script with the same environment (`trainer.session.keeping`). It
imports neither ray nor the modules that read manifests, so a trainer's packages are sufficient.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dataloaderjob.core import folders, places
from dataloaderjob.core.claims import BUSY, FREE, GRANTED, MAX_NBYTES, Claim, echo_text
from dataloaderjob.core.errors import DataLoaderJobError, InputError
from dataloaderjob.core.memory import memory_limit
from dataloaderjob.core.processes import alive
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.local.children import Loop, Started
from dataloaderjob.local.cluster import LocalCluster
from dataloaderjob.local.forks import Forked, environments
from dataloaderjob.local.reaper import give_up, is_anothers, locked, service_of
from dataloaderjob.local.service_plan import ServicePlan
from dataloaderjob.local.status import sidecar_status
from dataloaderjob.local.verdicts import VerdictFile, verdict_of
from dataloaderjob.providers.provider import LOCAL

LINGER_S = 3.0
"""Seconds for which the service stays after its starter and the last pool are gone. Another rank may follow in that
time."""
UNUSED_S = 120.0
"""Seconds for which a service stays if it has never had a client. The rank that started it may take a while to reach
its first iter()."""
SHARED_NBYTES_PER_RANK = 2 * 1024**3
LOOK_S = 0.5
MAX_LOG_NBYTES = 16 * 1024 * 1024
"""Maximum size of the log, because user code may print without limit."""
EXIT_FAILED = 1


@dataclass(slots=True)
class IdleShutdown:
    """The policy that decides when an unused service ends. `see` is called periodically."""

    started: float
    keep_s: float = 0.0
    """Seconds for which the service stays after its last script."""
    _last_pool: float | None = None
    """Time at which a pool was last seen; None if there has been none."""
    _starter_gone: float | None = None

    def see(self, *, receivers: int | None, starter_alive: bool, now: float) -> bool:
        """Returns True if the service should end. `receivers`: the number of the sidecar's receivers; None if the
        sidecar does not report it.

        A service with past clients stays while its starter lives, because the starter may create another loader. It
        ends once the starter and the last pool have been gone for LINGER_S or `keep_s`, whichever is longer. A service
        without any client ends UNUSED_S after its start at the latest.
        """
        if not starter_alive and self._starter_gone is None:
            self._starter_gone = now
        if receivers is None:
            return False
        if receivers:
            self._last_pool = now
            return False
        if (since := self.free_since()) is not None:
            return now - since >= max(LINGER_S, self.keep_s)
        return self._last_pool is None and now - self.started >= UNUSED_S

    def free_since(self) -> float | None:
        """Returns the time since which both the starter and the last pool have been gone; None while the starter is
        alive. Call it only if no pool exists now."""
        return None if self._starter_gone is None else max(self._starter_gone, self._last_pool or 0.0)


class Echo:
    """A writer of lines to another process's standard error. It drops a line rather than wait for a reader."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)

    def line(self, text: str) -> None:
        data = text.encode(errors="replace")[: select.PIPE_BUF - 1] + b"\n"
        try:
            # A pipe that polls writable takes PIPE_BUF bytes without blocking (pipe(7)).
            if self._fd is not None and select.select([], [self._fd], [], 0)[1]:
                os.write(self._fd, data)
        except OSError:
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class Service:
    """The service, which runs the cluster as long as it is in use."""

    def __init__(self, folder: Path, claim: Claim, plan: ServicePlan, echo: Echo, host: Started) -> None:
        """`claim`: the launch that started the service. `host`: the feeder host, already started. Raises InputError for
        settings that cannot work."""
        self._folder, self._claim = folder, claim
        self._echo = echo
        self._is_unheard = False
        self._loop = Loop()
        self._why: str | None = None
        self._failed_at = 0.0
        self._clients: set[int] = set()
        """Pids of the trainer processes that were attached at the last poll."""
        self._logged = 0
        self._over = False
        self._starter = pidfd_of(claim.pid)
        self._idle = IdleShutdown(time.monotonic(), claim.keep_s)
        self._told_idle = False
        self._verdict = VerdictFile(folder)
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._cluster = LocalCluster(
            plan, self._loop, show=self._show, broken=self._broken, socket_path=str(folder / places.SOCKET_NAME),
            run_id=os.environ[places.RUN_VARIABLE], folder=folder, host=host, record=_record(claim),
        )  # fmt: skip

    def run(self) -> int:
        self._loop.signals((signal.SIGINT, signal.SIGTERM), lambda _: self._leave())
        self._watch_starter()
        try:
            self._cluster.start({"folder": str(self._folder), "script": self._claim.script})
            self._control.bind(str(self._folder / places.CONTROL_NAME))
            self._control.setblocking(False)
            self._loop.watch(self._control.fileno(), self._heard)
            self._more_feeders()
            self._loop.every(LOOK_S, self._look)
            self._loop.run(until=lambda: self._over)
        finally:
            self._cluster.close()
        if self._why is None:
            return 0
        self._keep_reason()
        return EXIT_FAILED

    def _heard(self) -> None:
        """Handles messages: scripts claim this service, and ranks request more feeders."""
        with contextlib.suppress(OSError):  # no message is left, or the answer ended the service
            while True:
                data, fds, _, _ = socket.recv_fds(self._control, MAX_NBYTES, 1, socket.MSG_CMSG_CLOEXEC)
                if fds and data == echo_text(self._claim.run):
                    self._be_heard(fds[0])
                elif fds:
                    self._answer(Claim.parse(data), fds[0])
        self._more_feeders()

    def _answer(self, claim: Claim | None, reply: int) -> None:
        """Answers a claim with BUSY, FREE or GRANTED. After GRANTED, the service serves the claiming launch, or ends if
        the claim requests that. Closes `reply`."""
        try:
            if claim is None or self._over or not self._has_folder():
                return
            is_free, ours = self._is_free(), claim.run == self._claim.run
            if not is_free and (claim.ends or not ours):
                os.write(reply, BUSY)
                return
            if is_free and claim.joins:
                os.write(reply, FREE)
                return
            os.write(reply, GRANTED)  # fails if the claimant has given up waiting
            if claim.ends:
                self._leave(unless_used=True)
            elif is_free or not self._is_starter_alive():
                self._serve(claim, anew=is_free)
        except OSError:
            return
        finally:
            os.close(reply)

    def _be_heard(self, fd: int) -> None:
        """Sends the output of user code in feeders to `fd` from now on. Accepts one descriptor for each claim, and
        closes any other."""
        if self._is_unheard:
            self._is_unheard = False
            self._echo = Echo(fd)
        else:
            os.close(fd)

    def _is_free(self) -> bool:
        """Returns True if no one uses the service. Asks the sidecar again, because the last poll may be a second
        old."""
        return not self._is_starter_alive() and sidecar_status(self._cluster.socket).get("receivers") == []

    def _serve(self, claim: Claim, *, anew: bool) -> None:
        """Serves the claiming launch from now on. If no one uses the service, first forgets the last launch's number of
        feeders and verdict."""
        if anew:
            (self._folder / places.FEEDERS_NAME).unlink(missing_ok=True)
            self._cluster.forget_feeders()
            self._verdict.forget()
        self._echo.close()
        self._claim, self._is_unheard, self._told_idle = claim, True, False
        if self._starter is not None:
            self._loop.unwatch(self._starter)
            os.close(self._starter)
        self._starter = pidfd_of(claim.pid)
        self._watch_starter()
        self._idle = IdleShutdown(time.monotonic(), claim.keep_s)
        self._tell()

    def _tell(self, **more: float) -> None:
        """Updates the file that `dataloaderjob status` reads."""
        with contextlib.suppress(InputError, OSError):  # a full disk must not end the service
            self._cluster.tell({"folder": str(self._folder), "script": self._claim.script, **more})

    def _more_feeders(self) -> None:
        """Raises the number of feeders to the number that the launch requests."""
        with contextlib.suppress(OSError, ValueError):
            self._cluster.raise_to(int((self._folder / places.FEEDERS_NAME).read_text()))

    def _watch_starter(self) -> None:
        if self._starter is not None:
            self._loop.watch(self._starter, self._starter_ended)

    def _is_starter_alive(self) -> bool:
        return self._starter is not None and alive(self._starter)

    def _starter_ended(self) -> None:
        """Closes this process's copy of the starter's standard error. A reader such as `tee` waits until all writers
        have closed it."""
        assert self._starter is not None  # noqa: S101  the watched descriptor
        self._loop.unwatch(self._starter)
        self._echo.close()

    def _show(self, who: str, text: str, is_err: bool) -> None:  # noqa: ARG002  one log for both
        self._log(f"[{who}] {text}" if who else text)
        if who.startswith("feeder"):
            self._echo.line(f"[{who}] {text}")

    def _log(self, line: str) -> None:
        if self._logged > MAX_LOG_NBYTES:
            return
        self._logged += len(line) + 1
        if self._logged > MAX_LOG_NBYTES:
            line = (
                f"this log ends here, because it has reached {MAX_LOG_NBYTES >> 20} MiB and may be in memory"
            )
        with contextlib.suppress(OSError):  # a full disk must not end the service
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def _look(self) -> None:
        receivers, now = self._receivers(), time.monotonic()
        if receivers:
            self._clients = {int(found["trainer"]) for found in self._cluster.snapshot.receivers}
        if receivers and self._has_folder():
            self._verdict.write(verdict_of(self._cluster.snapshot.supervisor))
        if self._idle.see(receivers=receivers, starter_alive=self._is_starter_alive(), now=now):
            self._leave(unless_used=True)
        elif receivers and self._told_idle:
            self._told_idle = False
            self._tell()
        elif receivers == 0 and self._claim.keep_s and (since := self._idle.free_since()) is not None:
            self._tell_idle(self._claim.keep_s - (now - since))

    def _tell_idle(self, left_s: float) -> None:
        """Reports once to `dataloaderjob status` that the service waits for the next script."""
        if not self._told_idle:
            self._told_idle = True
            self._tell(kept_until=time.time() + left_s)

    def _receivers(self) -> int | None:
        """Returns the number of trainer processes that use the service; None while unknown.

        If the folder was removed, for example by a cleanup of temporary files, the sidecar cannot be reached through
        it. The number then comes from the sidecar's reports to the supervisor.
        """
        snapshot = self._cluster.snapshot
        if self._has_folder():
            said = snapshot.sidecar.get("receivers")
            return None if said is None else len(said)
        reports = snapshot.supervisor.get("sidecars", {}).values()
        return sum(int(report.get("receivers", 0)) for report in reports) if reports else None

    def _has_folder(self) -> bool:
        return service_of(self._folder) == os.getpid()

    def _leave(self, *, unless_used: bool = False) -> None:
        """Gives up the folder, so that the next rank starts another service.

        Holds the lock, so that no rank finds this service just before it ends. `unless_used`: does nothing if the
        service is in use.
        """
        with locked(self._folder):
            if unless_used and self._has_folder():
                status = sidecar_status(self._cluster.socket)
                if not status or status["receivers"]:
                    return
            self._close_control()
            self._cluster.end_sidecar()
            if not is_anothers(self._folder, os.getpid()):
                folders.remove(self._folder, places.FILES)
        self._over = True

    def _close_control(self) -> None:
        """Closes the control socket, so that later claims do not wait for an answer."""
        self._loop.unwatch(self._control.fileno())
        self._control.close()

    def _broken(self, why: str) -> None:
        """Ends the service. The folder remains, with the reason, for ranks that wait for the service or lose their
        sidecar."""
        self._why, self._failed_at = why, time.monotonic()
        self._close_control()
        if not is_anothers(self._folder, os.getpid()):
            fail(self._folder, why)
        self._over = True

    def _keep_reason(self) -> None:
        """Keeps the reason until the starter and all known clients have ended. Keeps it for at least LINGER_S, because
        a client may have attached at the last moment. Then removes it unless another service has taken the folder."""
        self._echo.close()
        clients = [pidfd for pid in self._clients if (pidfd := pidfd_of(pid)) is not None]
        for pidfd in clients if self._starter is None else [self._starter, *clients]:
            select.select([pidfd], [], [])
        time.sleep(max(0.0, self._failed_at + LINGER_S - time.monotonic()))
        give_up(self._folder, os.getpid())


def fail(folder: Path, why: str) -> None:
    """Leaves the reason in the folder for ranks that wait for the service or lose their sidecar. A later rank may start
    another service."""
    part = folder / ".failed"
    with contextlib.suppress(OSError):
        part.write_text(why + "\n")
        part.rename(folder / places.FAILED_NAME)
        (folder / places.PID_NAME).unlink(missing_ok=True)


def _record(claim: Claim) -> Path | None:
    """Returns the folder in which the script records the batches that it consumes. Returns None if the service outlives
    its script."""
    folder = os.environ.get(places.RECORD_VARIABLE)
    return Path(folder).absolute() if folder and not claim.keep_s else None


def plan(folder: Path, num_feeders: int, env: Mapping[str, str]) -> ServicePlan:
    """Plans a service with the defaults of a manifest, for all ranks that the launcher announces."""
    own, feeders = environments(env)
    ranks = max(1, int(env.get("LOCAL_WORLD_SIZE", "1")))
    return ServicePlan(
        job=f"private-{folder.name}", num_feeders=num_feeders, provider=LOCAL, env=own, feeder_env=feeders,
        feeder_cwd=Path.cwd(), loader=LoaderSettings(
            processes=ranks, shared_memory_nbytes=min(SHARED_NBYTES_PER_RANK * ranks, memory_limit() // 2)
        ),
    )  # fmt: skip


def main(host: Forked) -> int:
    """Runs the service. `host`: pid of the feeder host, and the read ends of the pipes from its stdout and stderr."""
    parser = argparse.ArgumentParser(description="serves the trainer processes of one launch on this machine")
    parser.add_argument("--dir", type=Path, required=True, help="folder of the socket")
    parser.add_argument("--feeders", type=int, required=True, help="number of feeders")
    parser.add_argument("--script", default="", help="name of the script, for display")
    parser.add_argument("--launch", default="", help="name of the launch, for claims of this service")
    parser.add_argument(
        "--keep", type=float, default=0.0, help="number of seconds to keep running after the last script"
    )
    parser.add_argument("--echo", type=int, help="descriptor for the output of user code in feeders")
    args = parser.parse_args()
    started = Started(*host)
    try:
        with folders.room(args.dir, InputError):
            folders.check(args.dir, places.REMEDY)
            made = plan(args.dir, args.feeders, os.environ)
            claim = Claim(run=args.launch, pid=os.getppid(), keep_s=args.keep, script=args.script)
            return Service(args.dir, claim, made, Echo(args.echo), started).run()
    except (DataLoaderJobError, OSError) as exc:
        fail(args.dir, str(exc))
        sys.stderr.write(f"service: {exc}\n")
        return EXIT_FAILED
    finally:
        started.kill()


def pidfd_of(pid: int) -> int | None:
    """Returns a pidfd of the process; None if it does not exist."""
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
