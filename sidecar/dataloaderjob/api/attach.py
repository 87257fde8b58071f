"""spec.trainers.attach: pods of other controllers that get their batches from this job's feeders. Pure.

Each pod in the job's namespace that carries the label `dataloading.dev/inject: NAME` is a trainer. The controllers of
these pods decide how many there are, and when they start and stop.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from dataloaderjob.api.base import Immutable, Model, Use, Whole
from dataloaderjob.api.pods import Name

ApiVersion = Annotated[
    str,
    Field(min_length=1, max_length=317, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?v[0-9][a-z0-9]*$"),
    Use("a group and a version such as trainer.kubeflow.org/v1alpha1, or a version alone such as v1"),
]
Kind = Annotated[
    str,
    Field(min_length=1, max_length=63, pattern=r"^[A-Z][A-Za-z0-9]*$"),
    Use("the name of a kind such as TrainJob"),
]
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
    Use("the name of an object: lower-case letters, digits, hyphens and dots"),
]


class FollowSpec(Model):
    """An object in the job's namespace whose end also ends the job, such as the TrainJob that owns the attached pods.

    The job completes if the object completes, and fails if the object fails or is deleted.
    """

    api_version: ApiVersion
    """Group and version of the object, such as `batch/v1`."""
    kind: Kind
    """Kind of the object, such as `Job`, `JobSet`, `TrainJob`, `PyTorchJob` or `RayJob`."""
    name: ObjectName
    """Name of the object."""

    @property
    def group(self) -> str:
        """The API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class AttachSpec(Model):
    """Pods of other controllers. Each pod carries the label `dataloading.dev/inject` with the job's name as its value,
    and therefore gets a sidecar."""

    container: Name | None = None
    """Name of the container that trains. If omitted: the pod's only container, or else the only one that requests a
    device such as `nvidia.com/gpu`. Ignored on one machine."""
    processes_per_pod: Whole = Field(default=1, ge=1, le=64)
    """Maximum number of trainer processes (ranks) in each pod. Each process gets a pool. On one machine, this limits
    the total number of processes of all scripts."""
    follow: FollowSpec | None = None
    """The object whose end also ends the job. If omitted: the job serves until it is deleted, or until
    `activeDeadlineSeconds` have passed. Ignored on one machine."""
    idle_seconds: Whole = Field(default=600, ge=0, le=31_536_000)
    """Time without attached pods after which the operator stops all feeders. The next pod to attach starts them again.
    0: feeders run only while pods are attached. On one machine, trainer processes count instead of pods."""

    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = (
        Immutable(
            field="processesPerPod",
            use="a new job, because the memory of attached pods' sidecars is sized for this number",
        ),
    )
