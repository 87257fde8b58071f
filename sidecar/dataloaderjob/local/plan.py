"""The plan of a manifest's run on one machine, and the run's life cycle as a table of transitions. This module starts
nothing: `run` executes both.

PREPARING  the service is being started; no trainer yet
TRAINING   trainers run
SERVING    trainers come and go: others start them (spec.trainers.attach)
FAILING    one trainer failed; the others have some time to end by themselves and report why
ENDING     trainers were sent a signal to end
KILLING    trainers were killed
OVER       no trainer is alive
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from pydantic import BaseModel

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.base import spell
from dataloaderjob.api.environment import add_env, expand, feeder_env
from dataloaderjob.api.feeders import CONTAINER as FEEDER_CONTAINER
from dataloaderjob.api.pods import Container, EnvVar, PodSpec
from dataloaderjob.core.autoscaling import Bounds
from dataloaderjob.core.errors import InputError
from dataloaderjob.local.autoscaling import bounds_of
from dataloaderjob.local.external import ExternalRay
from dataloaderjob.local.service_plan import ServicePlan
from dataloaderjob.providers.provider import RAY

FAILING_GRACE_S = 5.0
"""Seconds to wait for the other trainers to end after one has failed. A DDP peer of a failed rank notices the failure
and fails by itself within a second or two."""
ENDING_GRACE_S = 10.0
EXIT_OK = 0
EXIT_BROKEN = 1
EXIT_LATE = 124
"""The exit code after a deadline, the same as the command `timeout` uses."""
LAUNCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""Variables that a launcher around this command may have set; they are wrong for the ranks of this run."""
_IGNORED_JOB = ("ttlSecondsAfterFinished", "managedBy")
_IGNORED_POD = ("volumes", "initContainers", "securityContext", "imagePullSecrets")
_IGNORED_CONTAINER = ("image", "resources", "volumeMounts", "envFrom", "ports", "securityContext")
_IGNORED_SIDECAR = ("image", "resources", "scratch", "metricsPort", "securityContext")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """One replica's command and environment, without the variables that are known only at run time."""

    command: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachPlan:
    """Variables and limits of trainers that the run does not start itself. The socket's path is known only at run
    time."""

    env: Mapping[str, str]
    processes: int
    """Maximum number of attached processes."""
    idle_s: float
    """Seconds without attached processes after which all feeders are stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything that `run` needs from a manifest."""

    name: str
    suspend: bool
    folder: Path
    """Working directory of trainers and feeders."""
    trainers: tuple[TrainerPlan, ...]
    attach: AttachPlan | None = None
    """The plan for trainers that others start; None if the run starts its own. If it is set, `trainers` is empty."""
    service: ServicePlan
    min_feeders: int
    scale: tuple[int, int]
    """Minimum number of feeder replicas, and the number of feeders in each replica."""
    autoscaling: Bounds | None
    """Bounds on the number of feeders for autoscaling; None if the run is not scaled."""
    startup_s: float
    active_s: float | None
    ray_version: str | None
    """Ray's version according to the manifest."""
    ignored: tuple[str, ...] = field(default=())
    """Paths of manifest fields without effect on one machine."""


def plan(
    job: DataLoaderJob, *, folder: Path, env: Mapping[str, str], master_port: int, provider: str = RAY
) -> RunPlan:
    """Builds the plan of a manifest's run. `folder`: the folder that contains the manifest. `env`: this process's
    environment, which trainers and feeders inherit.

    Raises InputError for a manifest that only a cluster can run.
    """
    spec = job.spec
    cwd = folder if spec.trainers.attached else folder / (_container(job).working_dir or "")
    per_pod, active_s = spec.feeders.processes_per_pod, spec.active_deadline_seconds
    inherited = inherited_env(env)
    return RunPlan(
        name=job.name, suspend=spec.suspend, folder=cwd,
        trainers=tuple(
            _trainer(job, replica, inherited, master_port=master_port)
            for replica in range(spec.trainers.replicas)
        ),
        attach=_attach(job),
        service=_service(job, cwd, inherited, provider),
        min_feeders=spec.feeders.min_available * per_pod,
        scale=(spec.feeders.min_available, per_pod),
        autoscaling=bounds_of(spec.feeders),
        startup_s=float(spec.startup_deadline_seconds),
        active_s=None if active_s is None else float(active_s),
        ray_version=spec.ray.own.version,
        ignored=tuple(ignored(job, provider)),
    )  # fmt: skip


def _container(job: DataLoaderJob) -> Container:
    """Returns the container whose command is run. Raises InputError if it has none."""
    container = job.spec.trainers.own.container
    if not container.command:
        raise InputError(
            f"job {job.name} has no command, and `dataloaderjob run` does not use the image's entrypoint: "
            'set spec.trainers.job.template.spec.containers[0].command, such as ["python", '
            '"train.py"]'
        )
    return container


def _attach(job: DataLoaderJob) -> AttachPlan | None:
    attach = job.spec.trainers.attach
    if attach is None:
        return None
    return AttachPlan(
        env=job.spec.loader_environment(),
        processes=attach.processes_per_pod,
        idle_s=float(attach.idle_seconds),
    )


def inherited_env(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without variables of another run, a launcher or Ray. PATH begins with the folder of this
    interpreter."""
    kept = {
        name: value
        for name, value in env.items()
        if name not in LAUNCH_VARIABLES and not name.startswith(("PET_", "DATALOADERJOB_", "RAY_"))
    }
    programs = str(Path(sys.executable).parent)
    kept["PATH"] = ":".join([programs, *(p for p in kept.get("PATH", "").split(":") if p and p != programs)])
    return kept


def _trainer(
    job: DataLoaderJob, replica: int, inherited: Mapping[str, str], *, master_port: int
) -> TrainerPlan:
    trainer = job.spec.trainers.own
    launch = trainer.launch_environment(replica=replica, master_addr="127.0.0.1", master_port=master_port)
    if trainer.processes_per_pod == 1:  # all replicas are on this one machine
        launch |= {"LOCAL_RANK": str(replica), "LOCAL_WORLD_SIZE": str(trainer.replicas)}
    env = {"PYTHONUNBUFFERED": "1"} | dict(inherited) | launch | job.spec.loader_environment()
    env = add_env(add_env(env, job.spec.data.env), trainer.container.env)
    words = (*trainer.container.command, *trainer.container.args)
    return TrainerPlan(command=tuple(expand(word, env) for word in words), env=env)


def _service(job: DataLoaderJob, cwd: Path, inherited: Mapping[str, str], provider: str) -> ServicePlan:
    spec = job.spec
    for_feeders = feeder_env(spec, inherited)
    for_feeders.setdefault("PYTHONHASHSEED", "0")  # sets then have the same order in all feeders
    return ServicePlan(
        job=job.name, num_feeders=spec.feeders.count, env=inherited, sidecar_env=add_env(inherited, spec.sidecar.env),
        feeder_env=for_feeders, feeder_cwd=cwd, provider=provider,
        tuning=spec.ray.own.tuning.settings(), tasks=spec.ray.own.room(), external=_external(job, provider),
        tls=spec.loader.tls, loader=spec.loader_settings(replicas=max(1, spec.trainers.replicas)),
    )  # fmt: skip


def _external(job: DataLoaderJob, provider: str) -> ExternalRay | None:
    spec = job.spec
    if provider != RAY or spec.ray.external is None:
        return None
    if spec.ray.external.address is None:
        raise InputError(
            f'spec.ray.external.rayCluster: found "{spec.ray.external.ray_cluster}"; use spec.ray.external.address: '
            "one machine has no RayClusters"
        )
    return ExternalRay(
        address=spec.ray.external.address,
        feeder_resources=spec.feeders.ray_resources(),
        feeder_env=feeder_env(spec, {}),
    )


def ignored(job: DataLoaderJob, provider: str = RAY) -> Iterator[str]:
    """Yields the paths of fields that the manifest sets but a run on one machine ignores."""
    spec = job.spec
    if job.metadata.namespace is not None:
        yield "metadata.namespace"
    yield from _given(spec, _IGNORED_JOB, "spec")
    if provider == RAY:
        yield from _given(spec.ray.own, ("head",), "spec.ray.managed")
        if spec.ray.external is not None:
            yield from _given(spec.ray.external, ("tokenSecretRef", "resources"), "spec.ray.external")
    else:
        yield from _given(spec, ("ray",), "spec")
    yield from _given(spec.data, ("volumes", "volumeMounts", "envFrom"), "spec.data")
    yield from _from_elsewhere(spec.data.env, "spec.data")
    yield from _given(spec.sidecar, _IGNORED_SIDECAR, "spec.sidecar")
    yield from _from_elsewhere(spec.sidecar.env, "spec.sidecar")
    if (attach := spec.trainers.attach) is not None:
        yield from _given(attach, ("container", "follow"), "spec.trainers.attach")
    else:
        yield from _given(spec.trainers.own, ("metadata", "masterPort", "failurePolicy"), "spec.trainers.job")
    placed = () if provider == RAY and spec.ray.external is not None else ("resources",)
    yield from _given(spec.feeders, ("image", *placed, "scratch", "metadata"), "spec.feeders")
    templates = {"spec.feeders.template": spec.feeders.template}
    if not spec.trainers.attached:
        templates["spec.trainers.job.template"] = spec.trainers.template
    for path, template in templates.items():
        yield from _given(template, ("metadata",), path)
        yield from _pod(template.spec, f"{path}.spec", FEEDER_CONTAINER if "feeders" in path else None)


def _pod(pod: PodSpec, path: str, used: str | None) -> Iterator[str]:
    """Yields the ignored fields of a pod. `used`: the name of the container that runs on this machine; if None, the
    first container."""
    for i, container in enumerate(pod.containers):
        here = f"{path}.containers[{i}]"
        if container.name != used if used else i > 0:
            yield f"{here} ({container.name})"
            continue
        yield from _given(container, _IGNORED_CONTAINER, here)
        yield from (f"{here}.{name}" for name in container.model_extra or {})
        yield from _from_elsewhere(container.env, here)
        if used and container.working_dir is not None:
            yield f"{here}.workingDir"
    yield from _given(pod, _IGNORED_POD, path)
    yield from (f"{path}.{name}" for name in pod.model_extra or {})


def _from_elsewhere(variables: tuple[EnvVar, ...], path: str) -> Iterator[str]:
    """Yields variables that take their values from a source that only a cluster has."""
    for i, variable in enumerate(variables):
        if variable.value_from is not None:
            yield f"{path}.env[{i}].valueFrom ({variable.name})"


def _given(model: BaseModel, names: tuple[str, ...], path: str) -> Iterator[str]:
    for name, info in type(model).model_fields.items():
        alias = info.alias or name
        if alias in names and name in model.model_fields_set:
            yield f"{path}.{spell((alias,))}"


class RunState(Enum):
    PREPARING = auto()
    TRAINING = auto()
    SERVING = auto()
    FAILING = auto()
    ENDING = auto()
    KILLING = auto()
    OVER = auto()


class RunEvent(Enum):
    SERVED = auto()
    """The sidecar listens, and the run starts its trainers."""
    OPENED = auto()
    """The sidecar listens, and others start the trainers."""
    FAILED = auto()
    """A trainer ended with an error, but others are alive."""
    STOP = auto()
    """A signal arrived, a deadline passed, or the service broke."""
    GRACE = auto()
    """The grace period of the current state has ended."""
    ALL_ENDED = auto()


TRANSITIONS: dict[tuple[RunState, RunEvent], RunState] = {
    (RunState.PREPARING, RunEvent.SERVED): RunState.TRAINING,
    (RunState.PREPARING, RunEvent.OPENED): RunState.SERVING,
    (RunState.PREPARING, RunEvent.STOP): RunState.OVER,
    (RunState.TRAINING, RunEvent.FAILED): RunState.FAILING,
    (RunState.TRAINING, RunEvent.STOP): RunState.ENDING,
    (RunState.TRAINING, RunEvent.ALL_ENDED): RunState.OVER,
    (RunState.SERVING, RunEvent.STOP): RunState.OVER,
    (RunState.FAILING, RunEvent.GRACE): RunState.ENDING,
    (RunState.FAILING, RunEvent.STOP): RunState.ENDING,
    (RunState.FAILING, RunEvent.ALL_ENDED): RunState.OVER,
    (RunState.ENDING, RunEvent.GRACE): RunState.KILLING,
    (RunState.ENDING, RunEvent.STOP): RunState.KILLING,
    (RunState.ENDING, RunEvent.ALL_ENDED): RunState.OVER,
    (RunState.KILLING, RunEvent.ALL_ENDED): RunState.OVER,
}
"""A pair of state and event that is not listed has no effect."""
GRACE_S = {RunState.FAILING: FAILING_GRACE_S, RunState.ENDING: ENDING_GRACE_S}
"""Longest duration of a state, in seconds; the other states have no limit."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason to stop a run, other than the end of a trainer."""

    code: int
    why: str
    number: int = signal.SIGTERM
    """Signal that is sent to the trainers."""


def stopped_by(number: int, what: str = "trainers and service") -> Stop:
    name = signal.Signals(number).name
    return Stop(128 + number, f"received {name}: ending {what}", number)


class Lifecycle:
    """The state of a run. The first reason to end determines the exit code. Methods for events return the new state, or
    None if the state stays the same."""

    def __init__(self, num_trainers: int) -> None:
        self.state = RunState.PREPARING
        self.stop: Stop | None = None
        self._codes: dict[int, int] = {}
        """Exit codes as a shell reports them, by trainer number, in the order in which the trainers ended."""
        self._num_trainers = num_trainers

    @property
    def code(self) -> int:
        if self.stop is not None:
            return self.stop.code
        return next((code for code in self._codes.values() if code), EXIT_OK)

    @property
    def first_failure(self) -> tuple[int, int] | None:
        """Number and exit code of the first trainer to fail."""
        return next(((number, code) for number, code in self._codes.items() if code), None)

    def move(self, event: RunEvent) -> RunState | None:
        state = TRANSITIONS.get((self.state, event))
        self.state = state or self.state
        return state

    def halt(self, stop: Stop) -> RunState | None:
        """Handles a signal, a deadline, or a broken service. A second such event kills the trainers."""
        if self.stop is None and self.first_failure is None and self.state is not RunState.OVER:
            self.stop = stop
        return self.move(RunEvent.STOP)

    def ended(self, number: int, code: int) -> RunState | None:
        """Handles the end of a trainer."""
        self._codes[number] = code
        if len(self._codes) == self._num_trainers:
            return self.move(RunEvent.ALL_ENDED)
        return self.move(RunEvent.FAILED) if code else None
