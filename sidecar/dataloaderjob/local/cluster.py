"""The service on this machine: Ray or the feeder host, the supervisor and the sidecar. This module starts them in one
folder, watches them, and restarts any that end.

`restarts` makes the decisions, and this module carries them out. All processes carry the run's tag, so `close` can
leave no process, socket, shared memory or folder behind. `reaper` does the same if this process itself is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataloaderjob.core import folders, keys, places, supervision, timings
from dataloaderjob.core.errors import DataLoaderJobError, InputError
from dataloaderjob.core.handshake import new_key
from dataloaderjob.core.keys import Holder, Part
from dataloaderjob.core.settings import SidecarSettings, dump
from dataloaderjob.core.supervision import MAX_FEEDERS
from dataloaderjob.local import reaper
from dataloaderjob.local.certificates import RunCertificates, tls_folder
from dataloaderjob.local.children import Child, Command, Loop, Started
from dataloaderjob.local.external import ray_env
from dataloaderjob.local.forks import PYTHON, fork, host_command
from dataloaderjob.local.ports import ReservedPort
from dataloaderjob.local.reporting.keeper import Keeper
from dataloaderjob.local.reporting.series import REPORT, SERVICE
from dataloaderjob.local.restarts import (
    GiveUp,
    Instruction,
    RestartPolicy,
    ServicePart,
    Start,
    StopHead,
    StopSupervisor,
)
from dataloaderjob.local.run_folder import make_home
from dataloaderjob.local.service_plan import (
    KEY,
    ServicePlan,
    external_ray,
    key_file,
    sidecar_settings,
    supervisor_settings,
)
from dataloaderjob.local.status import RUN_FILE, Poller, Snapshot, sidecar_status
from dataloaderjob.providers.provider import RAY

if TYPE_CHECKING:
    from dataloaderjob.local.head import Heads

HOST_UP_S = 120.0
"""Deadline in seconds for the start of the host, which imports torch, possibly from a cold disk."""
LOOK_S = 0.2
END_S = 15.0
"""Seconds to wait for a supervisor to end its feeders."""
GRACE_S = 0.5
"""Seconds between SIGTERM and SIGKILL for the service's parts, which have nothing to save."""
LAST_WORDS = 5
RENEW_S = 600.0
"""Interval in seconds between checks for certificates that are due."""

Show = Callable[[str, str, bool], None]
"""Called with the source, a line, and True if the line reports a problem or arrived on stderr."""


class LocalCluster:
    """The service and its parts. Call `start`, run the loop, then call `close`, all in one thread."""

    def __init__(
        self,
        plan: ServicePlan,
        loop: Loop,
        *,
        show: Show,
        broken: Callable[[str], None],
        socket_path: str | None = None,
        run_id: str | None = None,
        folder: Path | None = None,
        host: Started | None = None,
        record: Path | None = None,
    ) -> None:
        """Creates the folder. Raises InputError for settings that cannot work, and then leaves nothing behind.

        `run_id`, `folder`, `host`: the tag, folder and feeder host of a private service, if they already exist.
        `record`: the folder of the run's record, which then also keeps the data for a report. Without a record, this
        data is removed when the run ends.
        """
        self.plan = plan
        self.run_id = run_id or secrets.token_hex(8)
        self._starter = (
            None if plan.external is not None
            else ServicePart.HEAD if plan.provider == RAY
            else ServicePart.HOST
        )  # fmt: skip
        self.policy = RestartPolicy(self._starter)
        self.home = make_home(ray=self.policy.ray)
        self.socket = socket_path or str(self.home / places.SOCKET_NAME)
        self.sidecar_listens = False
        self._loop, self._show, self._broken = loop, show, broken
        self._folder, self._host_started = folder, host
        self._host_socket = (folder or self.home) / places.HOST_NAME
        self._started_with = plan.num_feeders
        self._port = ReservedPort()
        self._key = new_key()
        self._children: dict[ServicePart, Child] = {}
        self._written: dict[str, Any] = {}
        self._words: dict[str, deque[str]] = {}
        self._reaper: Any = None
        self._forks = folder is not None
        """True if parts are forked: in a private service, until this process has a second thread."""
        self._closed = False
        self._sidecar_over = False
        self._heads: Heads | None = None
        if self.policy.ray:
            from dataloaderjob.local.head import Heads

            self._heads = Heads(
                self.home, loop, env=self.tag(plan.feeder_env), cwd=plan.feeder_cwd, tuning=plan.tuning,
                tasks=plan.tasks,
                serves=lambda: self._do(self.policy.serves(ServicePart.HEAD)), lost=self._head_lost,
            )  # fmt: skip
        try:
            self._sidecar_settings().check()
            self._certificates = RunCertificates(self.home) if plan.tls else None
        except BaseException:
            self._port.close()
            folders.remove_tree(self.home)
            raise
        self._poller = Poller(
            self.socket, port=self._port.number, key=self._key, job=plan.job, changed=self._polled,
            tls_folder=str(tls_folder(self.home, Part.SUPERVISOR)) if plan.tls else "",
        )  # fmt: skip
        self._record = record
        self._keeper: Keeper | None = None

    @property
    def snapshot(self) -> Snapshot:
        return self._poller.snapshot

    @property
    def num_desired(self) -> int:
        """The number of feeders last requested."""
        desired = self.snapshot.desired
        return self.plan.num_feeders if desired is None else desired

    def raise_to(self, feeders: int) -> None:
        """Keeps at least `feeders` feeders from now on."""
        if feeders > self._started_with:
            self._poller.raise_to(min(feeders, MAX_FEEDERS))

    def scale_to(self, feeders: int) -> None:
        """Keeps this number of feeders from now on."""
        self._poller.scale_to(feeders)

    def forget_feeders(self) -> None:
        """Makes the next call of `raise_to` apply even if an earlier request was higher."""
        self._started_with = 0
        self._poller.forget_feeders()

    def tell(self, about: Mapping[str, Any]) -> None:
        """Rewrites the file through which other commands find this run. `about` replaces the argument of `start`."""
        found = {
            "pid": os.getpid(), "run": self.run_id, "job": self.plan.job, "port": self._port.number,
            "socket": self.socket, "report": None if self._keeper is None else str(self._keeper.folder),
        }  # fmt: skip
        with folders.room(self.home, InputError):
            folders.write(self.home / f".{RUN_FILE}", json.dumps({**found, **about}).encode())
        (self.home / f".{RUN_FILE}").rename(self.home / RUN_FILE)

    def tag(self, env: Mapping[str, str]) -> dict[str, str]:
        return {**env, places.RUN_VARIABLE: self.run_id}

    def start(self, about: Mapping[str, Any]) -> None:
        """Starts all parts and returns. `about`: facts for the file through which other commands find this run.

        Raises InputError, OSError.
        """
        self._reaper = self._start_reaper()
        with folders.room(self.home, InputError):
            folders.write(self.home / KEY, self._key)
            for holder in (Holder.SIDECAR, Holder.FEEDER):
                folders.write(key_file(self.home, holder), keys.derive(self._key, holder))
            self._write_certificates()
        self._keeper = self._new_keeper(about)
        self.tell(about)
        self._do(self.policy.start())
        self._forks = False
        self._poller.start()
        self._loop.every(LOOK_S, self._look)
        if self._certificates is not None:
            self._loop.every(RENEW_S, self._write_certificates)

    def _write_certificates(self) -> None:
        if self._certificates is not None:
            self._certificates.write()

    def note(self, who: str, kind: str, what: str) -> None:
        """Adds an event to the data for a report. `who`: the source of the event."""
        if self._keeper is not None:
            self._keeper.tell(who, kind, what)

    def _new_keeper(self, about: Mapping[str, Any]) -> Keeper | None:
        """Starts collecting data for a report. If the folder is not writable, warns and returns None."""
        folder = self.home / REPORT
        if self._record is not None:
            folder = self._record / REPORT / f"{time.time_ns()}-{os.getpid()}"
        told = {
            "name": str(about.get("script") or self.plan.job), "provider": self.plan.provider,
            "feeders": self.plan.num_feeders, "cpus": len(os.sched_getaffinity(0)),
        }  # fmt: skip
        try:
            return Keeper(folder, self.home / timings.TIMES, told)
        except OSError as exc:
            self._show("run", f"cannot make a report of this run: {exc}", True)
            return None

    def _polled(self) -> None:
        self._loop.wake()
        if self._keeper is not None:
            self._keeper.see(self.snapshot)

    def _start_reaper(self) -> Any:
        env = self.tag(self.plan.env)
        if not self._forks:
            return reaper.start(self.run_id, self.home, env, self._folder)
        return Started(*fork("reaper", reaper.command(self.run_id, self.home, self._folder), env, "/"))

    # Instructions of the restart policy

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if self._closed:
                return
            match instruction:
                case Start(ServicePart.SIDECAR):
                    self._start_sidecar()
                case Start(ServicePart.SUPERVISOR, number):
                    self._start_supervisor(number)
                case Start(ServicePart.HOST):
                    self._start_host()
                case Start(ServicePart.HEAD, number):
                    self._ray_heads.start(number)
                case StopSupervisor():
                    self._stop(ServicePart.SUPERVISOR)
                case StopHead(number):
                    self._ray_heads.stop(number, GRACE_S)
                case GiveUp(why):
                    self._broken(why)

    @property
    def _ray_heads(self) -> Heads:
        assert self._heads is not None  # noqa: S101  the policy knows heads only with Ray
        return self._heads

    def _start_sidecar(self) -> None:
        if self._sidecar_over:
            return
        self._dump("sidecar", self._sidecar_settings())
        self.sidecar_listens = False
        env = self.plan.env if self.plan.sidecar_env is None else self.plan.sidecar_env
        self._serve(ServicePart.SIDECAR, "dataloaderjob.sidecar", env, self._on_sidecar)

    def _sidecar_settings(self) -> SidecarSettings:
        return sidecar_settings(self.plan, self.home, self.socket, self._port.number)

    def _start_supervisor(self, number: int) -> None:
        plan, env = self.plan, dict(self.plan.env)
        if plan.external is not None:
            env = ray_env(os.environ, env)
            who: dict[str, Any] = external_ray(plan, plan.external, self.run_id)
        elif self.policy.ray:
            head = self._ray_heads.head(number)
            env |= head.env()
            who = {"ray_address": head.address}
        else:
            who = {"host_socket": str(self._host_socket), "init_timeout_s": HOST_UP_S}
        settings = supervisor_settings(plan, self.home, self._port.number, who)
        self._dump("supervisor", settings)
        self._serve(ServicePart.SUPERVISOR, "dataloaderjob.supervisor.main", env, self._on_supervisor)

    def _start_host(self) -> None:
        started, self._host_started = self._host_started, None
        if started is None:  # an earlier host's socket would keep it from listening
            self._host_socket.unlink(missing_ok=True)
        command = host_command(str(self._host_socket))
        self._child(
            ServicePart.HOST, command, self.plan.feeder_env, self.plan.feeder_cwd, self._on_host, started
        )

    def _head_lost(self, number: int, why: str, feeders_live: bool) -> None:
        if number == self.policy.head_number:
            what = why.splitlines()[-1]
            self._show("run", f"Ray head {number} was lost ({what}): starting another", True)
            self.note(f"Ray head {number}", SERVICE, f"was lost ({what}): starting another")
        self._do(self.policy.head_lost(number, why, time.monotonic(), feeders_live=feeders_live))

    # Children

    def _serve(
        self, part: ServicePart, module: str, env: Mapping[str, str], on_line: Callable[[str, bool], None]
    ) -> None:
        settings = str(self.home / f"{part.value}.json")
        self._child(part, [*PYTHON, module, "--settings", settings], env, self.home, on_line)

    def _child(
        self,
        part: ServicePart,
        args: list[str],
        env: Mapping[str, str],
        cwd: Path,
        on_line: Callable[[str, bool], None],
        started: Started | None = None,
    ) -> None:
        self._words[part.value] = deque(maxlen=LAST_WORDS)
        command = Command(name=part.value, args=args, env=self.tag(env), cwd=cwd)
        if self._forks and started is None:
            started = Started(*fork(command.name, command.args, command.env, command.cwd))
        self._children[part] = Child(
            command,
            self._loop,
            on_line=on_line,
            on_end=lambda child: self._ended(part, child),
            started=started,
        )

    def _ended(self, part: ServicePart, child: Child) -> None:
        if self._children.get(part) is not child:
            return
        del self._children[part]
        why = "\n".join(self._words[part.value])
        if self.policy.state(part).name == "UP":
            what = f"ended with code {child.code}: restarting it"
            self._show("run", f"the {part.value} {what}", True)
            self.note(f"the {part.value}", SERVICE, what)
        self._do(self.policy.ended(part, child.code or 0, why, time.monotonic()))

    def _stop(self, part: ServicePart, grace_s: float = GRACE_S) -> None:
        if (child := self._children.pop(part, None)) is not None:
            child.end(grace_s)

    def _on_sidecar(self, line: str, is_err: bool) -> None:
        self._log(ServicePart.SIDECAR, line)
        if is_err:
            self._show("", line, True)
        elif line.startswith("{"):
            self.sidecar_listens = True
            self._do(self.policy.serves(ServicePart.SIDECAR))

    def _on_supervisor(self, line: str, is_err: bool) -> None:
        if not self._on_feeder(line, is_err):
            self._log(ServicePart.SUPERVISOR, line)
            if line.startswith(("supervisor: WARNING", "supervisor: ERROR")):
                self._show("", line, True)

    def _on_host(self, line: str, is_err: bool) -> None:
        """Shows output of the host. Lines without a feeder's name come from the host itself or from modules that it
        imports for all feeders."""
        if is_err or not self._on_feeder(line, is_err):
            self._log(ServicePart.HOST, line)
            if is_err or not line.startswith('{"pid"'):
                self._show("feeders", line, is_err)

    def _on_feeder(self, line: str, is_err: bool) -> bool:
        """Shows the line and returns True if it comes from user code in a feeder."""
        if not line.startswith(("[feeder-", "[Feeder] ")):
            return False
        who, _, text = line[1:].partition("] ")
        self._show(who, text, is_err)
        return True

    def _log(self, part: ServicePart, line: str) -> None:
        self._words[part.value].append(line)
        with contextlib.suppress(OSError), (self.home / f"{part.value}.log").open("a") as out:
            out.write(line + "\n")  # a full disk does not end the run

    def _dump(self, name: str, settings: Any) -> None:
        """Writes settings only if they have changed, so that a restart does not fail on a full disk."""
        if self._written.get(name) != settings:
            with folders.room(self.home, InputError):
                dump(settings, self.home / f"{name}.json")
            self._written[name] = settings

    def _look(self) -> None:
        """Handles everything that follows from the time or from the last status."""
        if self._closed:
            return
        self._do(self.policy.due(time.monotonic()))
        status, supervisor = self.snapshot.supervisor, self._children.get(ServicePart.SUPERVISOR)
        if supervisor is None or status.get("pid") != supervisor.pid:
            return
        self._do(self.policy.serves(ServicePart.SUPERVISOR))
        # The host listens before it has imported torch, so only a ready feeder shows that it works.
        if self._starter is ServicePart.HOST and status.get("ready"):
            self._do(self.policy.serves(ServicePart.HOST))
        if self.policy.old and status.get("ready") == status.get("desired"):
            self._do(self.policy.settled())

    # The end

    def end_sidecar(self) -> None:
        """Ends the sidecar permanently and removes its socket. Safe to call twice."""
        if self._sidecar_over:
            return
        self._sidecar_over = True
        self._stop(ServicePart.SIDECAR, 2.0)
        if self._folder is None or not reaper.is_anothers(self._folder, os.getpid()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.socket)

    def _end_external_feeders(self) -> None:
        """Makes the supervisor end its feeders on an existing Ray cluster. If that fails, the feeders end when their
        lease expires."""
        supervisor = self._children.get(ServicePart.SUPERVISOR)
        if self.plan.external is None or supervisor is None or not self.snapshot.supervisor.get("ray"):
            return
        with contextlib.suppress(OSError, DataLoaderJobError):
            supervision.ask(
                "127.0.0.1", self._port.number, self._key, job=self.plan.job, message={"type": "stop"}
            )
            supervisor.wait(END_S)

    def close(self) -> None:
        """Ends everything and waits for it. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._keeper is not None:
            sidecar, supervisor = sidecar_status(self.socket), self.snapshot.supervisor
            self._keeper.close(Snapshot(at=time.monotonic(), sidecar=sidecar, supervisor=supervisor))
        self._poller.stop()
        self._end_external_feeders()
        self._stop(ServicePart.SUPERVISOR)
        if self._heads is not None:
            self._heads.close(GRACE_S)
        self._stop(ServicePart.HOST)
        self.end_sidecar()
        but = () if self._reaper is None else (self._reaper.pid,)
        reaper.sweep(self.run_id, grace_s=1.0, but=but)
        folders.remove_tree(self.home)
        self._port.close()
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()
