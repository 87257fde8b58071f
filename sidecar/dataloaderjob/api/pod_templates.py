"""The places of pod templates in the objects of Kubernetes and of training controllers. Pure.

A row of `KINDS` names the kind and the paths of its templates. To support a kind, add its row and a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataloaderjob.api.base import Path
from dataloaderjob.api.plain import Object

EACH = "*"
"""Stands for each entry of a list, or each key of a mapping, in a path of the table."""
ANCESTOR_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
"""Label with which a Kubeflow Trainer runtime marks its jobs. Its value is `trainer` on the job that trains."""
_TEMPLATE = ("spec", "template")
_JOBS = ("spec", "replicatedJobs", EACH, "template", "spec", "template")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateKind:
    """A kind of object with pod templates."""

    group: str
    kinds: Sequence[str]
    """Names of the kinds."""
    paths: Sequence[tuple[str, ...]]
    helpers: Sequence[tuple[str, ...]] = ()
    """Paths of templates whose pods do not train. Such a template is injected only if it carries the label itself."""
    inner: tuple[str, ...] = ()
    """Path of nested objects of other kinds."""


KINDS: Sequence[TemplateKind] = (
    TemplateKind(group="", kinds=("Pod",), paths=((),)),
    TemplateKind(group="", kinds=("List",), paths=(), inner=("items", EACH)),
    TemplateKind(group="", kinds=("PodList",), paths=(("items", EACH),)),
    TemplateKind(group="", kinds=("PodTemplate",), paths=(("template",),)),
    TemplateKind(group="", kinds=("ReplicationController",), paths=(_TEMPLATE,)),
    TemplateKind(
        group="apps", kinds=("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"), paths=(_TEMPLATE,)
    ),
    TemplateKind(group="batch", kinds=("Job",), paths=(_TEMPLATE,)),
    TemplateKind(group="batch", kinds=("CronJob",), paths=(("spec", "jobTemplate", *_TEMPLATE),)),
    TemplateKind(group="jobset.x-k8s.io", kinds=("JobSet",), paths=(_JOBS,)),
    TemplateKind(
        group="trainer.kubeflow.org", kinds=("TrainingRuntime", "ClusterTrainingRuntime"), paths=((*_TEMPLATE, *_JOBS),)
    ),
    TemplateKind(
        group="kubeflow.org", kinds=("MPIJob",), paths=(("spec", "mpiReplicaSpecs", "Worker", "template"),),
        helpers=(("spec", "mpiReplicaSpecs", "Launcher", "template"),),
    ),
    TemplateKind(
        group="kubeflow.org", kinds=("PyTorchJob", "TFJob", "XGBoostJob", "PaddleJob", "JAXJob"),
        paths=tuple(
            ("spec", f"{name}ReplicaSpecs", EACH, "template") for name in ("pytorch", "tf", "xgb", "paddle", "jax")
        ),
    ),
    TemplateKind(
        group="ray.io", kinds=("RayCluster",), paths=(("spec", "workerGroupSpecs", EACH, "template"),),
        helpers=(("spec", "headGroupSpec", "template"),),
    ),
    TemplateKind(
        group="ray.io", kinds=("RayJob",), paths=(("spec", "rayClusterSpec", "workerGroupSpecs", EACH, "template"),),
        helpers=(("spec", "rayClusterSpec", "headGroupSpec", "template"), ("spec", "submitterPodTemplate")),
    ),
    TemplateKind(group="batch.volcano.sh", kinds=("Job",), paths=(("spec", "tasks", EACH, "template"),)),
    TemplateKind(
        group="leaderworkerset.x-k8s.io", kinds=("LeaderWorkerSet",),
        paths=tuple(
            ("spec", "leaderWorkerTemplate", name) for name in ("leaderTemplate", "workerTemplate")
        ),
    ),
    TemplateKind(
        group="workload.codeflare.dev", kinds=("AppWrapper",), paths=(),
        inner=("spec", "components", EACH, "template"),
    ),
)  # fmt: skip
MAX_DEPTH = 8
"""Maximum depth of objects within objects, such as AppWrappers in a List."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTemplate:
    """A pod template in an object."""

    path: Path
    template: Mapping[str, Any]
    helps: bool
    """True if the template's pods do not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTemplates:
    """The pod templates of one object and of the objects nested in it."""

    templates: Sequence[FoundTemplate]
    unknown: Sequence[tuple[Path, str]] = ()
    """Objects of kinds that the table lacks, as (path, kind)."""


def pod_templates(thing: Any, path: Path = ()) -> FoundTemplates:
    """Finds the pod templates of an object."""
    if len(path) > 4 * MAX_DEPTH or not isinstance(thing, Mapping):
        return FoundTemplates(templates=())
    kind, row = _name(thing), _row(thing)
    if row is None:
        return FoundTemplates(templates=(), unknown=((path, kind),))
    found = [
        FoundTemplate(path=(*path, *place), template=template, helps=helps or not _trains(thing, place))
        for paths, helps in ((row.paths, False), (row.helpers, True))
        for pattern in paths
        for place, template in _at(thing, pattern)
        if isinstance(template, Mapping)
    ]
    unknown: list[tuple[Path, str]] = []
    for place, inner in _at(thing, row.inner) if row.inner else ():
        within = pod_templates(inner, (*path, *place))
        found += within.templates
        unknown += within.unknown
    return FoundTemplates(templates=found, unknown=unknown)


def _name(thing: Object) -> str:
    return f"{thing.get('kind')} of {thing.get('apiVersion')}"


def _row(thing: Object) -> TemplateKind | None:
    group = str(thing.get("apiVersion")).rpartition("/")[0]
    kind = thing.get("kind")
    return next((row for row in KINDS if row.group == group and kind in row.kinds), None)


def _at(thing: Any, pattern: Sequence[str], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields every part of an object that a path of the table stands for."""
    if not pattern:
        yield path, thing
        return
    name, *rest = pattern
    if name != EACH:
        if isinstance(thing, Mapping) and name in thing:
            yield from _at(thing[name], rest, (*path, name))
        return
    entries = (
        thing.items() if isinstance(thing, Mapping) else enumerate(thing if isinstance(thing, list) else ())
    )
    for key, entry in entries:
        yield from _at(entry, rest, (*path, key))


def _trains(thing: Object, place: Path) -> bool:
    """Checks whether the pods of the template at `place` train. A Kubeflow Trainer runtime also has jobs that fetch
    data or a model."""
    if thing.get("kind") not in ("TrainingRuntime", "ClusterTrainingRuntime"):
        return True
    jobs = thing["spec"]["template"]["spec"]["replicatedJobs"]
    job = jobs[place[place.index("replicatedJobs") + 1]]
    steps: list[object] = [_at_or_none(other, _STEP) for other in jobs]
    if any(step is not None for step in steps):
        return _at_or_none(job, _STEP) == "trainer"
    return len(jobs) == 1 or _at_or_none(job, ("name",)) == "node"


_STEP = ("template", "metadata", "labels", ANCESTOR_STEP)


def _at_or_none(thing: Any, path: Sequence[str]) -> object:
    for name in path:
        thing = thing.get(name) if isinstance(thing, Mapping) else None
    return thing
