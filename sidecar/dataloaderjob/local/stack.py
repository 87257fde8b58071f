"""The service on this machine: Ray, supervisor and sidecar, started in one folder, watched and started again.

`care` decides, this module acts. Everything carries the run's tag, so that `close` leaves no process,
socket, memory or folder behind; `guard` does the same when this process itself is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataloaderjob.core.auth import new_key
from dataloaderjob.core.errors import InputError, ServiceError
from dataloaderjob.core.settings import RayTuning, SupervisorSettings, dump
from dataloaderjob.core.supervision import MAX_FEEDERS
from dataloaderjob.local import guard, tags
from dataloaderjob.local.care import Care, GiveUp, Instruction, Part, Start, StopHead, StopSupervisor
from dataloaderjob.local.children import Child, Command
from dataloaderjob.local.head import MAX_FOLDER_NBYTES, RayHead
from dataloaderjob.local.loop import Loop
from dataloaderjob.local.poller import Poller, Snapshot
from dataloaderjob.sidecar.settings import SidecarSettings

RUN_FILE = "run.json"
HOME_PREFIX = "dlj-run-"
HEAD_UP_S = 120.0
HEAD_POLL_S = 0.05
LOOK_S = 0.2
GRACE_S = 0.5
"""For Ray's processes, which have nothing to save."""
REGISTER_MARGIN_S = 30.0
LAST_WORDS = 5

Show = Callable[[str, str, bool], None]
"""(who, line, whether it is bad news or came on stderr)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """What the service is to be."""

    job: str
    num_feeders: int
    env: Mapping[str, str]
    """Base of the environment of sidecar and supervisor."""
    feeder_env: Mapping[str, str]
    """Of Ray's processes, and so of user code in feeders."""
    feeder_cwd: Path
    tuning: RayTuning = field(default_factory=RayTuning)
    processes: int = 1
    shared_memory_nbytes: int = 2 * 1024**3
    ring_nbytes: int | None = None
    prefetch: int = 16
    checksum: bool = False
    allow_pickle: bool = False
    batch_deadline_s: float = 300.0
    progress_after_s: float = 30.0
    metrics_port: int | None = None


class Stack:
    """`start`, then a loop that runs, then `close`, in one thread."""

    def __init__(
        self,
        plan: ServicePlan,
        loop: Loop,
        *,
        show: Show,
        broken: Callable[[str], None],
        socket_path: str | None = None,
    ) -> None:
        """Makes the folder. Raises InputError for what cannot work, and nothing is left then."""
        self.plan = plan
        self.run_id = secrets.token_hex(8)
        self.care = Care()
        self.home = _make_home()
        self.socket = socket_path or str(self.home / "s")
        self.sidecar_listens = False
        self._loop, self._show, self._broken = loop, show, broken
        self._port = _free_port()
        self._key = new_key()
        self._heads: dict[int, RayHead] = {}
        self._watched: dict[int, list[int]] = {}
        """Pidfds of each head's GCS and raylet."""
        self._sidecar: Child | None = None
        self._supervisor: Child | None = None
        self._words: dict[str, deque[str]] = {}
        self._guard: Any = None
        self._closed = False
        self._sidecar_over = False
        try:
            self._sidecar_settings().check()
        except BaseException:
            shutil.rmtree(self.home, ignore_errors=True)
            raise
        self._poller = Poller(self.socket, port=self._port, key=self._key, job=plan.job, changed=loop.wake)

    @property
    def snapshot(self) -> Snapshot:
        return self._poller.snapshot

    @property
    def num_desired(self) -> int:
        """As last scaled."""
        desired = self.snapshot.desired
        return self.plan.num_feeders if desired is None else desired

    def tag(self, env: Mapping[str, str]) -> dict[str, str]:
        return {**env, tags.RUN_VARIABLE: self.run_id}

    def start(self, about: Mapping[str, Any]) -> None:
        """Starts all parts and returns. `about` goes into the file by which other commands find this run."""
        _write(self.home / "key", self._key)
        self._guard = guard.start(self.run_id, self.home, self.tag(self.plan.env))
        found = {
            "pid": os.getpid(),
            "run": self.run_id,
            "job": self.plan.job,
            "port": self._port,
            "socket": self.socket,
        }
        _write(self.home / RUN_FILE, json.dumps({**found, **about}).encode())
        self._do(self.care.start())
        self._poller.start()
        self._loop.every(LOOK_S, self._look)

    # Instructions of care

    def _do(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if self._closed:
                return
            match instruction:
                case Start(Part.SIDECAR):
                    self._start_sidecar()
                case Start(Part.SUPERVISOR, number):
                    self._start_supervisor(number)
                case Start(Part.HEAD, number):
                    self._start_head(number)
                case StopSupervisor():
                    self._stop_supervisor()
                case StopHead(number):
                    self._stop_head(number)
                case GiveUp(why):
                    self._broken(why)

    def _start_sidecar(self) -> None:
        if self._sidecar_over:
            return
        dump(self._sidecar_settings(), self.home / "sidecar.json")
        self.sidecar_listens = False
        self._sidecar = self._child("sidecar", "dataloaderjob.sidecar", self.plan.env, self._on_sidecar)

    def _sidecar_settings(self) -> SidecarSettings:
        plan = self.plan
        return SidecarSettings(
            job=plan.job, socket=self.socket, key_path=str(self.home / "key"), blobs=str(self.home / "blobs"),
            supervisor_host="127.0.0.1", supervisor_port=self._port, processes=plan.processes,
            shared_memory_nbytes=plan.shared_memory_nbytes, ring_nbytes=plan.ring_nbytes,
            prefetch=plan.prefetch, batch_deadline_s=plan.batch_deadline_s,
            progress_after_s=plan.progress_after_s, checksum=plan.checksum, allow_pickle=plan.allow_pickle,
            metrics_port=plan.metrics_port,
        )  # fmt: skip

    def _start_supervisor(self, number: int) -> None:
        head, plan = self._heads[number], self.plan
        settings = SupervisorSettings(
            job=plan.job, key_path=str(self.home / "key"), blob_folder=str(self.home / "blobs"),
            feeder_blob_folder=str(self.home / "blobs"), ray_address=head.address,
            num_feeders=plan.num_feeders, state_path=str(self.home / "feeders.json"), port=self._port,
            ready_timeout_s=plan.tuning.worker_register_timeout_s + REGISTER_MARGIN_S,
            worker_register_timeout_s=plan.tuning.worker_register_timeout_s,
        )  # fmt: skip
        dump(settings, self.home / "supervisor.json")
        env = {**self.plan.env, **head.env()}
        self._supervisor = self._child(
            "supervisor", "dataloaderjob.feeder.supervisor", env, self._on_supervisor
        )

    def _start_head(self, number: int) -> None:
        head = RayHead(
            self.home / f"r{number}", tuning=self.plan.tuning, resources={"feeder": float(MAX_FEEDERS)},
            base_env=self.tag(self.plan.feeder_env), cwd=self.plan.feeder_cwd,
        )  # fmt: skip
        self._heads[number] = head
        head.start()
        self._await_head(number, time.monotonic() + HEAD_UP_S)

    def _await_head(self, number: int, deadline: float) -> None:
        head = self._heads.get(number)
        if head is None or self._closed:
            return
        try:
            up = head.poll_up() is not None and len(head.vital_pidfds()) == 2
            if not up and time.monotonic() > deadline:
                raise ServiceError(
                    f"Ray's head was not up after {HEAD_UP_S:.0f} s; its log is {head.log_path}"
                )
        except ServiceError as exc:
            self._head_lost(number, str(exc), feeders_live=False)
            return
        if not up:
            self._loop.later(HEAD_POLL_S, lambda: self._await_head(number, deadline))
            return
        for name, pidfd in head.vital_pidfds().items():
            self._watch_vital(number, name, os.dup(pidfd))
        self._do(self.care.serves(Part.HEAD))

    def _watch_vital(self, number: int, name: str, pidfd: int) -> None:
        self._watched.setdefault(number, []).append(pidfd)

        def ended() -> None:
            self._loop.unwatch(pidfd)
            live = name != "raylet" and "raylet" in self._heads[number].pids().values()
            self._head_lost(number, f"{name} ended", feeders_live=live)

        self._loop.watch(pidfd, ended)

    def _head_lost(self, number: int, why: str, *, feeders_live: bool) -> None:
        if number == self.care.head_number:
            what = why.splitlines()[-1]
            self._show("run", f"Ray head {number} is lost ({what}), another is started", True)
        self._do(self.care.head_lost(number, why, time.monotonic(), feeders_live=feeders_live))

    def _stop_supervisor(self) -> None:
        if self._supervisor is not None:
            self._supervisor.end(GRACE_S)
            self._supervisor = None

    def _stop_head(self, number: int) -> None:
        head = self._heads.pop(number, None)
        for pidfd in self._watched.pop(number, ()):
            self._loop.unwatch(pidfd)
            os.close(pidfd)
        if head is not None:
            head.stop(GRACE_S)
            shutil.rmtree(head.folder, ignore_errors=True)

    # Children

    def _child(
        self, name: str, module: str, env: Mapping[str, str], on_line: Callable[[str, bool], None]
    ) -> Child:
        self._words[name] = deque(maxlen=LAST_WORDS)
        args = [sys.executable, "-P", "-m", module, "--settings", str(self.home / f"{name}.json")]
        command = Command(name=name, args=args, env=self.tag(env), cwd=self.home)
        return Child(command, self._loop, on_line=on_line, on_end=self._child_ended)

    def _child_ended(self, child: Child) -> None:
        if child is self._sidecar:
            part, self._sidecar = Part.SIDECAR, None
        elif child is self._supervisor:
            part, self._supervisor = Part.SUPERVISOR, None
        else:
            return
        why = "\n".join(self._words[child.name])
        if self.care.state(part).name == "UP":
            self._show("run", f"the {child.name} ended with code {child.code}, it is started again", True)
        self._do(self.care.ended(part, child.code or 0, why, time.monotonic()))

    def _on_sidecar(self, line: str, is_err: bool) -> None:
        self._log("sidecar", line)
        if is_err:
            self._show("", line, True)
        elif line.startswith("{"):
            self.sidecar_listens = True
            self._do(self.care.serves(Part.SIDECAR))

    def _on_supervisor(self, line: str, is_err: bool) -> None:
        if line.startswith(("[feeder-", "[Feeder] ")):
            who, _, text = line[1:].partition("] ")
            self._show(who, text, is_err)
            return
        self._log("supervisor", line)
        if line.startswith(("supervisor: WARNING", "supervisor: ERROR")):
            self._show("", line, True)

    def _log(self, name: str, line: str) -> None:
        self._words[name].append(line)
        with (self.home / f"{name}.log").open("a") as out:
            out.write(line + "\n")

    def _look(self) -> None:
        """What comes with time rather than by an event."""
        if self._closed:
            return
        self._do(self.care.due(time.monotonic()))
        said = self.snapshot.supervisor
        if self._supervisor is None or said.get("pid") != self._supervisor.pid:
            return
        self._do(self.care.serves(Part.SUPERVISOR))
        if self.care.old and said.get("ready") == said.get("desired"):
            self._do(self.care.settled())

    # The end

    def end_sidecar(self) -> None:
        """Ends it and removes its socket; it is not started again. Safe to call twice."""
        if self._sidecar_over:
            return
        self._sidecar_over = True
        if self._sidecar is not None:
            self._sidecar.end(2.0)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)

    def close(self) -> None:
        """Ends everything, here and now. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._poller.stop()
        self._stop_supervisor()
        for number in list(self._heads):
            self._stop_head(number)
        self.end_sidecar()
        but = () if self._guard is None else (self._guard.pid,)
        tags.sweep(self.run_id, grace_s=1.0, but=but)
        shutil.rmtree(self.home, ignore_errors=True)
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()


def _make_home() -> Path:
    """A folder short enough for Ray's sockets. Raises InputError when there is none."""
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108  a folder of its own is made in it
        if len(os.fsencode(base)) + len(HOME_PREFIX) + len("/xxxxxxxx/r99") <= MAX_FOLDER_NBYTES:
            with contextlib.suppress(OSError):
                return Path(tempfile.mkdtemp(prefix=HOME_PREFIX, dir=base))
    raise InputError(
        f"a folder that can be written and whose path is short enough for Ray's sockets is needed, neither "
        f"{tempfile.gettempdir()} nor /tmp is one: set TMPDIR to a path of at most 18 bytes"
    )


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as out:
        out.write(data)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
