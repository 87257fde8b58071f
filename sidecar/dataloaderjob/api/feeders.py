"""spec.feeders: the processes that run Dataset and collate_fn. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field, WithJsonSchema

from dataloaderjob.api.base import LEAVE_UNSET, Model, Resources, Rule, Whole, nested, resources
from dataloaderjob.api.pods import (
    RAY_NODE_ENV,
    Image,
    PodTemplate,
    ScratchSpec,
    WorkloadMetadata,
    owned_field_rules,
)
from dataloaderjob.core.supervision import MAX_FEEDERS

CONTAINER = "feeder"
"""Name of the container in which feeders run. `template` may extend it."""
OWNED = {
    "command": f"{LEAVE_UNSET}, because the operator starts the feeders",
    "args": f"{LEAVE_UNSET}, because the operator starts the feeders",
    "image": "spec.feeders.image",
    "resources": "spec.feeders.resources",
}


class AutoscalingMode(StrEnum):
    """The operator's response to a recommended number of feeders."""

    OFF = "Off"
    """Does nothing. The status still contains the verdict."""
    RECOMMEND = "Recommend"
    """Recommends a number in the status."""
    AUTO = "Auto"
    """Changes `replicas` within the bounds."""


class AutoscalingSpec(Model):
    """Scaling of feeders according to the time that training spends waiting for input."""

    mode: Annotated[
        AutoscalingMode, WithJsonSchema({"type": "string", "enum": [mode.value for mode in AutoscalingMode]})
    ] = AutoscalingMode.RECOMMEND
    """`Recommend`: the status recommends a number of replicas. `Auto`: the operator also changes `replicas`, through
    the scale subresource, unless a HorizontalPodAutoscaler targets the job. `"Off"`: neither. It needs the quotes
    because YAML reads Off as false."""
    min_replicas: Whole | None = Field(default=None, ge=1, le=1_024)
    """Minimum number of replicas in `Auto` mode. If omitted: `minAvailable`, but at least 1."""
    max_replicas: Whole = Field(default=32, ge=1, le=1_024)
    """Maximum number of replicas in `Auto` mode."""
    cost_ceiling: Whole | None = Field(default=None, ge=1, le=65_536)
    """Maximum number of CPUs that all feeder pods together may request in `Auto` mode. If omitted: only
    `maxReplicas` counts."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="minReplicas",
            use="at most maxReplicas",
            cel="!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
            found="string(self.minReplicas) + ', above maxReplicas ' + string(self.maxReplicas)",
        ),
    )


_RAY_NAMES = {"cpu": "CPU", "memory": "memory", "gpu": "GPU"}
_NOT_RAYS = ("ephemeral-storage", "hugepages-")
"""Prefixes of the names of resources that a Ray node does not have."""
RAY_STEP = 10_000
"""Ray counts resources in ten-thousandths."""


def _in_rays_steps(amount: float) -> float:
    return int(amount) if amount >= 2 else int(amount * RAY_STEP) / RAY_STEP


class FeedersSpec(Model):
    """The feeders. Each is one Ray actor with its own processes for user code."""

    replicas: Whole = Field(default=1, ge=0, le=1_024)
    """Number of feeder pods. On one machine, replicas * processesPerPod feeders run. May be changed while the job runs,
    for example with `kubectl scale dlj`."""
    min_available: Whole = Field(default=1, ge=0, le=1_024)
    """Number of feeder pods that must serve before the trainers start and the job is Ready. The job gets up to
    `replicas` pods if there is room. 0: trainers start at once and wait for batches, as on one machine."""
    processes_per_pod: Whole = Field(default=1, ge=1, le=64)
    """Feeders per pod; the total is replicas * processesPerPod. The feeders of a pod share one copy of the dataset's
    arrays."""
    autoscaling: AutoscalingSpec = nested(AutoscalingSpec)
    """Recommends or sets the number of replicas, according to how long training waits for input."""
    resources: Resources = resources(
        requests={"cpu": "1", "memory": "2Gi"}, limits={"cpu": "1", "memory": "2Gi"}
    )
    """Resources of each feeder pod, for all of its processes together. On one machine, they are ignored unless
    `spec.ray.external` is set: Ray then places each feeder by its share of them."""
    scratch: ScratchSpec = nested(ScratchSpec)
    """Disk space of each feeder pod, and of the head, for data that the Dataset holds. Ignored on one machine."""
    image: Image | None = None
    """Image of the feeders and the Ray head. If omitted: the trainer's image, which must then contain
    `dataloaderjob[feeder]`."""
    metadata: WorkloadMetadata = nested(WorkloadMetadata)
    """Labels and annotations of the feeders' Deployment."""
    template: PodTemplate = nested(PodTemplate)
    """Additions to the feeder pods, such as volumes and tolerations.

    A container named `feeder` extends the feeders' own container (env, volumeMounts, ...).
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="replicas",
            use="at least minAvailable, or lower minAvailable (0 allows a job without feeders)",
            cel="self.replicas >= self.minAvailable",
            found="string(self.replicas) + ', below minAvailable ' + string(self.minAvailable)",
        ),
        Rule(
            field="processesPerPod",
            use=f"values of replicas and processesPerPod whose product is at most {MAX_FEEDERS}",
            cel=f"self.replicas * self.processesPerPod <= {MAX_FEEDERS}",
            found="'replicas * processesPerPod = ' + string(self.replicas * self.processesPerPod)",
        ),
        Rule(
            field="autoscaling.maxReplicas",
            use=f"at least minAvailable, and at most {MAX_FEEDERS} / processesPerPod, or a mode other than Auto",
            cel="self.autoscaling.mode != 'Auto' || (self.autoscaling.maxReplicas >= self.minAvailable && "
            f"self.autoscaling.maxReplicas * self.processesPerPod <= {MAX_FEEDERS})",
            found="string(self.autoscaling.maxReplicas)",
        ),
        *owned_field_rules(CONTAINER, OWNED),
        *RAY_NODE_ENV,
    )

    def ray_resources(self) -> dict[str, float]:
        """Returns the resources that one feeder takes from an existing Ray cluster, keyed by Ray's names for them."""
        amounts = {**self.resources.limits, **self.resources.requests}
        found = {
            _RAY_NAMES.get(name.rpartition("/")[2], name): float(amount.value) / self.processes_per_pod
            for name, amount in amounts.items()
            if not name.startswith(_NOT_RAYS)
        }
        return {name: _in_rays_steps(amount) for name, amount in found.items()}

    @property
    def count(self) -> int:
        """The total number of feeder processes."""
        return self.replicas * self.processes_per_pod

    def autoscaling_bounds(self) -> tuple[int, int]:
        """Returns the minimum and the maximum number of replicas in `Auto` mode. `costCeiling` may lower the maximum,
        but not below the minimum."""
        spec = self.autoscaling
        least = max(1, self.min_available, spec.min_replicas or 1)
        most = spec.max_replicas
        if spec.cost_ceiling is not None:
            most = min(most, int(spec.cost_ceiling / max(1e-3, self._pod_cpus())))
        return least, max(least, most)

    def _pod_cpus(self) -> float:
        found = self.resources.requests.get("cpu") or self.resources.limits.get("cpu")
        return 1.0 if found is None else float(found.value)
