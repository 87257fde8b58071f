"""The private service of one launch: what `local.__main__` runs once the feeder host is on its way.

Started by the first rank (`trainer.session.private`), detached, for all local ranks. The sidecar's socket is DIR/s;
DIR/failed says why it could not serve. It ends after its last client and removes DIR; or it stays a while for the next
script of the same environment (`trainer.session.keeping`), which claims it. A trainer's installation is enough for
it: it imports neither ray nor what reads manifests.
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
from dataloaderjob.local.cluster import LocalCluster, ServicePlan
from dataloaderjob.local.forks import Forked, environments
from dataloaderjob.local.reaper import give_up, is_anothers, locked, service_of
from dataloaderjob.local.status import sidecar_status
from dataloaderjob.providers.provider import LOCAL

LINGER_S = 3.0
"""The service stays so long after its starter and the last pool are gone: the next rank may come."""
UNUSED_S = 120.0
"""A service that never had a client stays so long; who started it may have much to do before its first iter()."""
SHARED_NBYTES_PER_RANK = 2 * 1024**3
LOOK_S = 0.5
MAX_LOG_NBYTES = 16 * 1024 * 1024
"""User code prints as much as it likes."""
EXIT_FAILED = 1


@dataclass(slots=True)
class IdleShutdown:
    """Fed with what is seen, from time to time."""

    started: float
    keep_s: float = 0.0
    """How long the service is to stay after its last script."""
    _last_pool: float | None = None
    """When a pool was seen last."""
    _starter_gone: float | None = None

    def see(self, *, receivers: int | None, starter_alive: bool, now: float) -> bool:
        """Whether the service should end. `receivers`: None while the sidecar does not say.

        Once it has had clients it stays as long as its starter, who may make another loader at any time, and LINGER_S
        or `keep_s` after the last of all. Without a client it ends so long after its starter, or after UNUSED_S.
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
        """The moment since which nobody has a use for it, if there is no pool; None while its starter lives."""
        return None if self._starter_gone is None else max(self._starter_gone, self._last_pool or 0.0)


class Echo:
    """Lines to somebody else's standard error. One that is not read is not waited for."""

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
    """The cluster for as long as somebody uses it."""

    def __init__(self, folder: Path, claim: Claim, plan: ServicePlan, echo: Echo, host: Started) -> None:
        """`claim`: whom it was started for. `host`: the feeder host, which has been started. Raises InputError for what
        cannot work."""
        self._folder, self._claim = folder, claim
        self._echo = echo
        self._is_unheard = False
        self._loop = Loop()
        self._why: str | None = None
        self._logged = 0
        self._over = False
        self._starter = _open(claim.pid)
        self._idle = IdleShutdown(time.monotonic(), claim.keep_s)
        self._told_idle = False
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._cluster = LocalCluster(
            plan, self._loop, show=self._show, broken=self._broken, socket_path=str(folder / places.SOCKET_NAME),
            run_id=os.environ[places.RUN_VARIABLE], folder=folder, host=host,
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
        """A script claims this service, or a rank wants more feeders."""
        with contextlib.suppress(OSError):  # nothing is left to read, or an answer was to leave
            while True:
                data, fds, _, _ = socket.recv_fds(self._control, MAX_NBYTES, 1, socket.MSG_CMSG_CLOEXEC)
                if fds and data == echo_text(self._claim.run):
                    self._be_heard(fds[0])
                elif fds:
                    self._answer(Claim.parse(data), fds[0])
        self._more_feeders()

    def _answer(self, claim: Claim | None, reply: int) -> None:
        """Becomes the service of this launch, or ends, if it is nobody's. Takes the descriptor."""
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
            os.write(reply, GRANTED)  # one that has given up waiting does not get the service
            if claim.ends:
                self._leave(unless_used=True)
            elif is_free or not self._is_starter_alive():
                self._serve(claim, anew=is_free)
        except OSError:
            return
        finally:
            os.close(reply)

    def _be_heard(self, fd: int) -> None:
        """User code in feeders is heard there, if the launch was granted the service with its last claim."""
        if self._is_unheard:
            self._is_unheard = False
            self._echo = Echo(fd)
        else:
            os.close(fd)

    def _is_free(self) -> bool:
        """Asked anew: what the last poll said may be a second old."""
        return not self._is_starter_alive() and sidecar_status(self._cluster.socket).get("receivers") == []

    def _serve(self, claim: Claim, *, anew: bool) -> None:
        """Becomes the launch's service. `anew`: nobody uses it, and it gets as many feeders as the launch asks for."""
        if anew:
            (self._folder / places.FEEDERS_NAME).unlink(missing_ok=True)
            self._cluster.forget_feeders()
        self._echo.close()
        self._claim, self._is_unheard, self._told_idle = claim, True, False
        if self._starter is not None:
            self._loop.unwatch(self._starter)
            os.close(self._starter)
        self._starter = _open(claim.pid)
        self._watch_starter()
        self._idle = IdleShutdown(time.monotonic(), claim.keep_s)
        self._tell()

    def _tell(self, **more: float) -> None:
        """Tells `dataloaderjob status` whom this serves."""
        with contextlib.suppress(InputError, OSError):  # a disk that is full shall not end the service
            self._cluster.tell({"folder": str(self._folder), "script": self._claim.script, **more})

    def _more_feeders(self) -> None:
        """There are never fewer of them than the launch asked for."""
        with contextlib.suppress(OSError, ValueError):
            self._cluster.raise_to(int((self._folder / places.FEEDERS_NAME).read_text()))

    def _watch_starter(self) -> None:
        if self._starter is not None:
            self._loop.watch(self._starter, self._starter_ended)

    def _is_starter_alive(self) -> bool:
        return self._starter is not None and alive(self._starter)

    def _starter_ended(self) -> None:
        """What it wrote to may wait for our end of it: a pipe to `tee`, say."""
        assert self._starter is not None  # noqa: S101  it is what was watched
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
            line = f"this log ends here: it holds {MAX_LOG_NBYTES >> 20} MiB, and lies in memory perhaps"
        with contextlib.suppress(OSError):  # a disk that is full shall not end the service
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()

    def _look(self) -> None:
        receivers, now = self._receivers(), time.monotonic()
        if self._idle.see(receivers=receivers, starter_alive=self._is_starter_alive(), now=now):
            self._leave(unless_used=True)
        elif receivers and self._told_idle:
            self._told_idle = False
            self._tell()
        elif receivers == 0 and self._claim.keep_s and (since := self._idle.free_since()) is not None:
            self._tell_idle(self._claim.keep_s - (now - since))

    def _tell_idle(self, left_s: float) -> None:
        """Says once, for `dataloaderjob status`, that this waits for the next script."""
        if not self._told_idle:
            self._told_idle = True
            self._tell(kept_until=time.time() + left_s)

    def _receivers(self) -> int | None:
        """Trainer processes that use the service; None while nobody says.

        Where somebody removed the folder (a cleaner of temporary files), the sidecar can no longer be asked, or it is
        another service's that answers there. The supervisor still hears from ours.
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
        """Gives the folder up. From then on a rank that looks finds no service and starts another there.

        Under the lock, so that no rank is between finding this service and attaching to it.
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
        """Who claims this service from now on does not wait for an answer."""
        self._loop.unwatch(self._control.fileno())
        self._control.close()

    def _broken(self, why: str) -> None:
        """The folder stays, with the reason in it, for ranks that wait or lose their sidecar now."""
        self._why = why
        self._close_control()
        if not is_anothers(self._folder, os.getpid()):
            fail(self._folder, why)
        self._over = True

    def _keep_reason(self) -> None:
        """Keeps it until its starter ends, unless another service has been started in the folder by then."""
        self._echo.close()
        if self._starter is not None:
            select.select([self._starter], [], [])
        give_up(self._folder, os.getpid())


def fail(folder: Path, why: str) -> None:
    """Tells the ranks that wait, and those that lose their sidecar now, why. The next one may start another service."""
    part = folder / ".failed"
    with contextlib.suppress(OSError):
        part.write_text(why + "\n")
        part.rename(folder / places.FAILED_NAME)
        (folder / places.PID_NAME).unlink(missing_ok=True)


def plan(folder: Path, num_feeders: int, env: Mapping[str, str]) -> ServicePlan:
    """A service as the manifest's defaults describe it, for all ranks that the launcher announces."""
    own, feeders = environments(env)
    ranks = max(1, int(env.get("LOCAL_WORLD_SIZE", "1")))
    return ServicePlan(
        job=f"private-{folder.name}", num_feeders=num_feeders, provider=LOCAL, env=own, feeder_env=feeders,
        feeder_cwd=Path.cwd(), loader=LoaderSettings(
            processes=ranks, shared_memory_nbytes=min(SHARED_NBYTES_PER_RANK * ranks, memory_limit() // 2)
        ),
    )  # fmt: skip


def main(host: Forked) -> int:
    """`host`: pid of the feeder host, and the reading ends of its output and errors."""
    parser = argparse.ArgumentParser(description="serves the trainer processes of one launch on this machine")
    parser.add_argument("--dir", type=Path, required=True, help="folder of the socket")
    parser.add_argument("--feeders", type=int, required=True, help="number of feeders")
    parser.add_argument("--script", default="", help="name of the script, for people")
    parser.add_argument("--launch", default="", help="name of the launch, for those that claim this service")
    parser.add_argument("--keep", type=float, default=0.0, help="seconds to stay after the last script")
    parser.add_argument("--echo", type=int, help="descriptor where user code in feeders is heard")
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


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
