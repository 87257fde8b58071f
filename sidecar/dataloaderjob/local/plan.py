"""Turns a manifest into what one machine does with it. Pure: nothing is started here."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.base import spell
from dataloaderjob.api.feeders import CONTAINER as FEEDER_CONTAINER
from dataloaderjob.api.trainer import EnvVar, PodSpec
from dataloaderjob.local.cluster import ServicePlan
from dataloaderjob.providers.provider import RAY

LAUNCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""What a launcher around this command may have set: wrong for the ranks of this run."""
_IGNORED_JOB = ("backoffLimit", "ttlSecondsAfterFinished", "managedBy")
_REFERENCE = re.compile(r"\$(?:\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """One replica's command, but for its environment's run-time part."""

    command: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """All that `run` needs of a manifest."""

    name: str
    suspend: bool
    folder: Path
    """Where trainers and feeders run."""
    trainers: tuple[TrainerPlan, ...]
    service: ServicePlan
    min_feeders: int
    scale: tuple[int, int | None, int]
    """Least and most replicas of feeders, and feeders in each."""
    startup_s: float
    active_s: float | None
    ray_version: str | None
    ignored: tuple[str, ...] = field(default=())
    """Paths of the manifest's fields that mean nothing here."""


def plan(
    job: DataLoaderJob, *, folder: Path, env: Mapping[str, str], master_port: int, provider: str = RAY
) -> RunPlan:
    """`folder`: the manifest's. `env`: this process's, which trainers and feeders inherit."""
    spec = job.spec
    container = spec.trainer.container
    cwd = folder / (container.working_dir or "")
    per_pod, active_s = spec.feeders.processes_per_pod, spec.deadlines.active_deadline_seconds
    inherited = inherited_env(env)
    return RunPlan(
        name=job.name, suspend=spec.suspend, folder=cwd,
        trainers=tuple(
            _trainer(job, replica, inherited, master_port=master_port)
            for replica in range(spec.trainer.replicas)
        ),
        service=_service(job, cwd, inherited, provider),
        min_feeders=spec.feeders.min_replicas * per_pod,
        scale=(spec.feeders.min_replicas, spec.feeders.max_replicas, per_pod),
        startup_s=float(spec.deadlines.startup_seconds),
        active_s=None if active_s is None else float(active_s),
        ray_version=spec.ray.version,
        ignored=tuple(ignored(job, provider)),
    )  # fmt: skip


def inherited_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment but for what another run, launcher or Ray put there; this interpreter's programs come first."""
    kept = {
        name: value
        for name, value in env.items()
        if name not in LAUNCH_VARIABLES and not name.startswith(("PET_", "DATALOADERJOB_", "RAY_"))
    }
    programs = str(Path(sys.executable).parent)
    kept["PATH"] = ":".join([programs, *(p for p in kept.get("PATH", "").split(":") if p and p != programs)])
    return kept


def add_env(base: Mapping[str, str], variables: tuple[EnvVar, ...]) -> dict[str, str]:
    """A container's variables over `base`; `$(OTHER)` as Kubernetes expands it, in order."""
    env: MutableMapping[str, str] = dict(base)
    for variable in variables:
        if variable.value_from is None:
            env[variable.name] = expand(variable.value or "", env)
    return dict(env)


def expand(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` to its value, `$$` to `$`; a name that is not there stays as it is."""
    return _REFERENCE.sub(lambda m: "$" if m[1] is None else env.get(m[1], m[0]), text)


def _trainer(
    job: DataLoaderJob, replica: int, inherited: Mapping[str, str], *, master_port: int
) -> TrainerPlan:
    trainer = job.spec.trainer
    launch = trainer.launch_environment(replica=replica, master_addr="127.0.0.1", master_port=master_port)
    if trainer.processes_per_replica == 1:  # all replicas are on this one machine
        launch |= {"LOCAL_RANK": str(replica), "LOCAL_WORLD_SIZE": str(trainer.replicas)}
    env = {"PYTHONUNBUFFERED": "1"} | dict(inherited) | launch | job.spec.loader_environment()
    env = add_env(env, trainer.container.env)
    words = (*trainer.container.command, *trainer.container.args)
    return TrainerPlan(command=tuple(expand(word, env) for word in words), env=env)


def _service(job: DataLoaderJob, cwd: Path, inherited: Mapping[str, str], provider: str) -> ServicePlan:
    spec = job.spec
    feeder_env = dict(inherited)
    for container in spec.feeders.template.spec.containers:
        if container.name == FEEDER_CONTAINER:
            feeder_env = add_env(feeder_env, container.env)
    feeder_env.setdefault("PYTHONHASHSEED", "0")  # sets iterate alike in all feeders
    return ServicePlan(
        job=job.name, num_feeders=spec.feeders.count, env=inherited, feeder_env=feeder_env, feeder_cwd=cwd,
        provider=provider,
        tuning=spec.ray.tuning.settings(), loader=spec.loader_settings(replicas=spec.trainer.replicas),
    )  # fmt: skip


def ignored(job: DataLoaderJob, provider: str = RAY) -> Iterator[str]:
    """Fields that the manifest gives and one machine has no use for, by path."""
    spec = job.spec
    if job.metadata.namespace is not None:
        yield "metadata.namespace"
    yield from _given(spec, _IGNORED_JOB, "spec")
    if provider == RAY:
        yield from _given(spec.ray, ("headResources",), "spec.ray")
    else:
        yield from _given(spec, ("ray",), "spec")
    yield from _given(spec.sidecar, ("image", "resources"), "spec.sidecar")
    yield from _given(spec.feeders, ("image", "resources"), "spec.feeders")
    for path, template in (
        ("spec.feeders.template", spec.feeders.template),
        ("spec.trainer.template", spec.trainer.template),
    ):
        yield from _given(template, ("metadata",), path)
        yield from _pod(template.spec, f"{path}.spec", FEEDER_CONTAINER if "feeders" in path else None)


def _pod(pod: PodSpec, path: str, used: str | None) -> Iterator[str]:
    """`used`: the name of the container that runs here; None: the first."""
    for i, container in enumerate(pod.containers):
        here = f"{path}.containers[{i}]"
        if container.name != used if used else i > 0:
            yield f"{here} ({container.name})"
            continue
        yield from _given(container, ("image", "resources"), here)
        yield from (f"{here}.{name}" for name in container.model_extra or {})
        yield from (
            f"{here}.env[{j}].valueFrom ({variable.name})"
            for j, variable in enumerate(container.env)
            if variable.value_from is not None
        )
        if used and container.working_dir is not None:
            yield f"{here}.workingDir"
    yield from _given(pod, ("volumes",), path)
    yield from (f"{path}.{name}" for name in pod.model_extra or {})


def _given(model: BaseModel, names: tuple[str, ...], path: str) -> Iterator[str]:
    for name, info in type(model).model_fields.items():
        alias = info.alias or name
        if alias in names and name in model.model_fields_set:
            yield f"{path}.{spell((alias,))}"
