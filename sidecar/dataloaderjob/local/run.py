"""`dataloaderjob run job.yaml`: starts the service, runs the trainers' command once per replica, then cleans up.

`plan` makes the decisions, and `cluster` provides the service. This module handles the trainers' processes, deadlines,
signals and output.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.core import folders
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.input_bound import InputVerdict
from dataloaderjob.core.places import RECORD_VARIABLE, SOCKET_VARIABLE
from dataloaderjob.local.attaching import Attached, Idleness, how_to_attach
from dataloaderjob.local.autoscaling import RunAutoscaler
from dataloaderjob.local.children import Child, Command, Loop, check_words, exit_code
from dataloaderjob.local.cluster import LocalCluster
from dataloaderjob.local.console import Console, progress_line, summary, table_of
from dataloaderjob.local.external import checked
from dataloaderjob.local.plan import (
    EXIT_BROKEN,
    EXIT_LATE,
    GRACE_S,
    Lifecycle,
    RunEvent,
    RunPlan,
    RunState,
    Stop,
    TrainerPlan,
    plan,
    stopped_by,
)
from dataloaderjob.local.ports import ReservedPort
from dataloaderjob.local.reporting.series import ENDED, FAILED
from dataloaderjob.local.service import fail, pidfd_of
from dataloaderjob.local.status import WINDOW_S, History, Snapshot, sidecar_status
from dataloaderjob.local.verdicts import closing_words, verdict_of
from dataloaderjob.providers.provider import RAY

PROGRESS_LIVE_S = 1.0
PROGRESS_LINE_S = 10.0
OUTPUT_GRACE_S = 1.5
"""Maximum wait in seconds for the last output of user code in feeders. The output passes through Ray's log monitor,
which polls twice a second."""
OUTPUT_QUIET_S = 0.7
REASON_S = 3.0
"""Maximum wait in seconds for attached trainers to read why the run has ended, and to exit."""
LAST_LOOK_S = 0.2
"""Seconds to wait for a trainer that attaches as the run ends. Trainers poll every 0.05 s."""
HOST_QUIET_S = 0.1
"""Seconds without output after which feeders of the feeder host are expected to print no more. The host forwards their
output immediately."""


def run(
    job: DataLoaderJob,
    manifest: Path,
    *,
    metrics_port: int | None = None,
    provider: str = RAY,
    record: Path | None = None,
) -> int:
    """Runs a manifest. Returns the exit code. Raises InputError before anything is started. `record`: folder in which
    trainers record the batches that they consume."""
    master_port = ReservedPort()
    planned = plan(
        job,
        folder=manifest.resolve().parent,
        env=os.environ,
        master_port=master_port.number,
        provider=provider,
    )
    planned = replace(planned, service=replace(planned.service, metrics_port=metrics_port))
    if record is not None:
        planned = recorded(planned, record)
    console = Console()
    if planned.ignored:
        console.say(f"ignored on one machine: {', '.join(planned.ignored)}")
    if planned.suspend:
        console.say(f"{planned.name} is suspended (spec.suspend: true): nothing is started")
        return 0
    check(planned)
    if planned.service.external is not None:
        planned = replace(
            planned, service=replace(planned.service, external=checked(planned.service.external))
        )
    return Run(planned, manifest, console, master_port, record).run()


def recorded(planned: RunPlan, folder: Path) -> RunPlan:
    """Returns the plan, changed so that trainers record the batches that they consume. Raises InputError if `folder`
    cannot be used for a record."""
    try:
        folders.make_for_owner(folder)
        os.close(folders.enter(folder, InputError))
    except OSError as exc:
        raise InputError(f"--record requires a writable folder, but {folder} is not one: {exc}") from exc
    variable = {RECORD_VARIABLE: os.path.abspath(folder)}
    trainers = tuple(replace(trainer, env={**trainer.env, **variable}) for trainer in planned.trainers)
    attach = planned.attach and replace(planned.attach, env={**planned.attach.env, **variable})
    return replace(planned, trainers=trainers, attach=attach)


def check(planned: RunPlan) -> None:
    """Raises InputError for settings that are certain to fail."""
    if not planned.folder.is_dir():
        raise InputError(
            f"the trainer's workingDir {planned.folder} is not a folder: create it, or change "
            "spec.trainers.job.template.spec.containers[0].workingDir"
        )
    if (port := planned.service.metrics_port) is not None:
        _check_port(port)
    for number, trainer in enumerate(planned.trainers):
        if number == 0:
            _check_program(planned.folder, trainer)
        check_words(f"trainer-{number}", trainer.command, trainer.env)
    check_words("feeders", (), planned.service.feeder_env)
    if planned.service.provider == RAY:
        _check_ray(planned.ray_version)


def _check_program(folder: Path, trainer: TrainerPlan) -> None:
    program, path = trainer.command[0], trainer.env.get("PATH")
    if shutil.which(str(folder / program) if "/" in program else program, path=path) is None:
        raise InputError(
            f"the trainer's program {program!r} was found neither in {folder} nor on "
            "PATH: install it, or change spec.trainers.job.template.spec.containers[0].command"
        )


def _check_ray(wanted: str | None) -> None:
    try:
        installed = version("ray")
    except PackageNotFoundError as exc:
        raise InputError(
            "Ray is not installed on this machine: pip install 'dataloaderjob[local]', or use --provider "
            "local"
        ) from exc
    if wanted is not None and wanted.split(".") != installed.split(".")[: len(wanted.split("."))]:
        raise InputError(
            f"spec.ray.managed.version is {wanted}, but this machine has Ray {installed}: install that "
            "version, or change spec.ray.managed.version"
        )


class Run:
    """One run, in one thread."""

    def __init__(
        self,
        planned: RunPlan,
        manifest: Path,
        console: Console,
        master_port: ReservedPort,
        record: Path | None = None,
    ) -> None:
        """`master_port`: the port for the rendezvous of the plan's trainers. `record`: the folder of the run's
        record."""
        self._plan, self._manifest, self._console = planned, manifest, console
        self._master_port = master_port
        self._ray = planned.service.provider == RAY
        self._own_ray = self._ray and planned.service.external is None
        self._starting = (
            "the supervisor is not up" if self._ray and not self._own_ray
            else "Ray's head and the supervisor are not up" if self._ray
            else "the feeder host and the supervisor are not up"
        )  # fmt: skip
        self._loop = Loop()
        # This precedes the creation of anything that a signal could leave behind.
        self._loop.signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._on_signal)
        self._lifecycle = Lifecycle(len(planned.trainers))
        self._cluster = LocalCluster(
            planned.service, self._loop, show=self._show, broken=self._broken, record=record
        )
        self._trainers: list[Child] = []
        self._served = False
        self._progress_s = PROGRESS_LIVE_S if console.live else PROGRESS_LINE_S
        self._history = History(max(WINDOW_S, self._progress_s))
        self._verdict: InputVerdict | None = None
        """The last known verdict; None if there has been none."""
        self._autoscaler = (
            None
            if planned.autoscaling is None
            else RunAutoscaler(
                planned.autoscaling,
                planned.scale[1],
                len(os.sched_getaffinity(0)),
                scale=self._cluster.scale_to,
                say=console.say,
            )
        )
        self._feeder_spoke_at: float | None = None
        self._started = time.monotonic()
        self._attached = Attached()
        self._idleness: Idleness | None = None
        if planned.attach is not None:
            self._idleness = Idleness(planned.attach.idle_s, self._started)

    def run(self) -> int:
        try:
            self._cluster.start(self._about())
            parts = "Ray, the sidecar" if self._own_ray else "the sidecar"
            self._console.say(f"{self._plan.name}: starting {parts}, feeders: {self._cluster.num_desired}")
            self._loop.later(self._plan.startup_s, self._startup_over)
            if self._plan.active_s is not None:
                self._loop.later(self._plan.active_s, self._active_over)
            self._loop.every(0.2, self._look)
            self._loop.every(self._progress_s, self._progress)
            self._loop.run(until=lambda: self._lifecycle.state is RunState.OVER)
            self._flush()
            self._history.add(Snapshot(at=time.monotonic(), sidecar=sidecar_status(self._cluster.socket)))
            if self._idleness is not None and self._lifecycle.stop is not None:
                self._leave_reason(self._lifecycle.stop.why)
        finally:
            self._console.clear()
            for child in self._trainers:
                child.end(0.0)
            self._cluster.close()
        self._conclude()
        return self._lifecycle.code

    def _leave_reason(self, why: str) -> None:
        """Ends the sidecar, and leaves the reason beside its socket. Trainers that are attached, or are about to
        attach, read it there."""
        pidfds = [fd for pid in self._attached.pids if (fd := pidfd_of(pid)) is not None]
        fail(Path(self._cluster.socket).parent, why)
        self._cluster.end_sidecar()
        deadline = time.monotonic() + REASON_S
        time.sleep(LAST_LOOK_S)
        for pidfd in pidfds:
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
            os.close(pidfd)

    def _about(self) -> dict[str, Any]:
        """Returns the facts that other commands need about this run."""
        least, per_pod = self._plan.scale
        about: dict[str, Any] = {"manifest": str(self._manifest.resolve()), "min": least, "per_pod": per_pod}
        if (attach := self._plan.attach) is not None:
            about["attach"] = {"env": dict(attach.env), "processes": attach.processes}
        return about

    # Events

    def _look(self) -> None:
        self._console.flush()
        if self._cluster.sidecar_listens:
            opened = RunEvent.SERVED if self._idleness is None else RunEvent.OPENED
            self._enter(self._lifecycle.move(opened))
        snapshot = self._cluster.snapshot
        self._history.add(snapshot)
        self._verdict = verdict_of(snapshot.supervisor) or self._verdict
        if self._autoscaler is not None:
            self._autoscaler.look(
                time.monotonic(), snapshot, frozen="" if self._trains() else "no trainer runs"
            )
        if self._idleness is not None and self._lifecycle.state is RunState.SERVING:
            self._attend(self._idleness, snapshot)
        if not self._served and snapshot.desired is not None and snapshot.ready >= self._plan.min_feeders:
            self._served = True
            seconds = time.monotonic() - self._started
            self._console.say(f"ready after {seconds:.1f} s, feeders {snapshot.ready}/{snapshot.desired}")

    def _trains(self) -> bool:
        if self._idleness is None:
            return self._lifecycle.state is RunState.TRAINING
        return self._lifecycle.state is RunState.SERVING and bool(len(self._attached))

    def _attend(self, idleness: Idleness, snapshot: Snapshot) -> None:
        """Reports trainers that come and go, and stops feeders that no trainer needs."""
        if "receivers" not in snapshot.sidecar:  # the sidecar is being restarted; its trainers wait for it
            return
        for text in self._attached.update(snapshot.receivers):
            self._console.say(text)
        feeders = idleness.look(len(self._attached), snapshot.desired, time.monotonic())
        if feeders is None:
            return
        self._cluster.scale_to(feeders)
        if feeders:
            self._console.say(f"a trainer is attached: starting {feeders} feeders")
        else:
            self._served = True  # without trainers, no feeders are awaited
            self._console.say("no trainer is attached: stopping all feeders until one attaches")

    def _on_signal(self, number: int) -> None:
        self._console.clear()
        what = "trainers and service" if self._idleness is None else "the service"
        self._halt(stopped_by(number, what))

    def _broken(self, why: str) -> None:
        self._halt(Stop(EXIT_BROKEN, f"the service cannot continue: {why}"))

    def _startup_over(self) -> None:
        if not self._served:
            missing = "; ".join((*self._awaited(), *self._cluster.snapshot.notes))
            late = (
                f"the service did not start within spec.startupDeadlineSeconds ({self._plan.startup_s:g} s)"
            )
            self._halt(Stop(EXIT_LATE, f"{late}: {missing}"))

    def _awaited(self) -> list[str]:
        """Describes each part for which the run still waits before the job can be served."""
        snapshot = self._cluster.snapshot
        missing = []
        if not self._cluster.sidecar_listens:
            missing.append("the sidecar is not listening")
        if snapshot.desired is None:
            missing.append(self._starting)
        else:
            missing.append(f"{snapshot.ready} of {self._plan.min_feeders} required feeders have reported")
        return missing

    def _active_over(self) -> None:
        live = ", ".join(child.name for child in self._trainers if child.code is None) or str(self._attached)
        live = live or "no trainer"
        why = f"the job ran longer than spec.activeDeadlineSeconds ({self._plan.active_s:g} s)"
        self._halt(Stop(EXIT_LATE, f"{why}; still running: {live}"))

    def _halt(self, stop: Stop) -> None:
        if self._lifecycle.state is not RunState.OVER:
            self._console.say(stop.why)
            self._cluster.note("run", FAILED, stop.why)
        self._enter(self._lifecycle.halt(stop))

    def _trainer_ended(self, child: Child) -> None:
        number, code = self._trainers.index(child), exit_code(child.code or 0)
        self._cluster.note(child.name, FAILED if code else ENDED, f"ended with exit code {code}")
        if code:
            self._console.say(f"{child.name} ended with exit code {code}")
        self._enter(self._lifecycle.ended(number, code))

    # Actions

    def _enter(self, state: RunState | None) -> None:
        if state is RunState.TRAINING:
            self._start_trainers()
        elif state is RunState.SERVING:
            self._say_how_to_attach()
        elif state is RunState.ENDING:
            number = signal.SIGTERM if self._lifecycle.stop is None else self._lifecycle.stop.number
            for child in self._trainers:
                child.signal(number)
        elif state is RunState.KILLING:
            for child in self._trainers:
                child.signal(signal.SIGKILL)
        if state in GRACE_S:
            self._loop.later(GRACE_S[state], lambda: self._grace_over(state))

    def _say_how_to_attach(self) -> None:
        assert self._plan.attach is not None  # noqa: S101  the state SERVING is for attached trainers
        most = self._plan.attach.processes
        self._console.say(
            f"waiting for trainers, {most} process{'es' * (most > 1)} at a time; run this in their shells: "
            f"{how_to_attach(self._plan.name)}"
        )

    def _grace_over(self, state: RunState | None) -> None:
        if self._lifecycle.state is state:
            self._enter(self._lifecycle.move(RunEvent.GRACE))

    def _start_trainers(self) -> None:
        self._master_port.close()  # not every process that listens on it sets SO_REUSEADDR
        for number, trainer in enumerate(self._plan.trainers):
            name = f"trainer-{number}"
            env = self._cluster.tag({**trainer.env, SOCKET_VARIABLE: self._cluster.socket})
            command = Command(name=name, args=trainer.command, env=env, cwd=self._plan.folder)
            self._trainers.append(
                Child(
                    command, self._loop, on_end=self._trainer_ended,
                    on_line=lambda line, is_err, name=name: self._console.line(name, line, is_err),  # type: ignore[misc]
                )
            )  # fmt: skip

    # Output

    def _show(self, who: str, text: str, is_err: bool) -> None:
        if who.startswith("feeder"):
            self._feeder_spoke_at = time.monotonic()
        if who == "run":
            self._console.say(text)
        else:
            self._console.line(who, text, is_err)

    def _progress(self) -> None:
        desired, notes = self._cluster.num_desired, self._cluster.snapshot.notes
        self._history.add(self._cluster.snapshot)
        if self._console.live:
            awaited = () if self._served else (f"starting: {'; '.join(self._awaited())}",)
            self._console.show(table_of(self._plan.name, self._history, desired=desired, notes=awaited))
        elif self._idleness is None or self._attached or notes:  # a service without trainers needs no line
            text = progress_line(self._history, desired)
            self._console.say(f"{text} ({notes[0]})" if notes else text)

    def _flush(self) -> None:
        """Waits for the last output of user code in feeders, if it has printed anything."""
        if self._feeder_spoke_at is None:
            return
        began = time.monotonic()

        def quiet() -> bool:
            now, spoke_at = time.monotonic(), max(self._feeder_spoke_at or 0.0, began)
            quiet_s = OUTPUT_QUIET_S if self._ray else HOST_QUIET_S
            return now - began > OUTPUT_GRACE_S or now - spoke_at > quiet_s

        self._loop.run(until=quiet)

    def _conclude(self) -> None:
        failure = self._lifecycle.first_failure
        if self._lifecycle.stop is None and failure is not None:
            how = f"trainer-{failure[0]} failed with exit code {failure[1]}"
        else:
            how = "ended" if self._lifecycle.stop is None else "was stopped"
        seconds = time.monotonic() - self._started
        total = summary(self._history.total, seconds, self._cluster.policy.restarts)
        closing = closing_words(
            self._verdict, self._history.total, per_pod=self._plan.scale[1], cpus=len(os.sched_getaffinity(0))
        )
        self._console.say(f"{self._plan.name}: {how}; {total}{closing}")


def _check_port(port: int) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError) as exc:
        raise InputError(
            f"cannot serve --metrics-port {port} on 127.0.0.1: {exc}; choose another port"
        ) from exc
