"""spec.feeders: the processes that run Dataset and collate_fn. Pure."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from dataloaderjob.api.base import Model, Resources, Rule, Whole, nested, resources
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
"""Name of the container in which feeders run; `template` may add to it."""
OWNED = {
    "command": "nothing: the operator starts the feeders",
    "args": "nothing: the operator starts the feeders",
    "image": "spec.feeders.image",
    "resources": "spec.feeders.resources",
}


class FeedersSpec(Model):
    """Feeders: one Ray actor each, with its own processes for user code."""

    replicas: Whole = Field(default=1, ge=0, le=1_024)
    """Feeder pods; on one machine, a factor of the number of feeders. May change while the job runs.

    `kubectl scale dlj` changes it.
    """
    min_available: Whole = Field(default=1, ge=0, le=1_024)
    """Feeder pods that must serve before trainers start, and for the job to be Ready. It gets up to `replicas` as room
    allows. 0: trainers start at once and wait for batches, as on one machine."""
    processes_per_pod: Whole = Field(default=1, ge=1, le=64)
    """Feeders in each pod, replicas * processesPerPod in all. A pod's feeders share one copy of the dataset's
    arrays."""
    resources: Resources = resources(
        requests={"cpu": "1", "memory": "2Gi"}, limits={"cpu": "1", "memory": "2Gi"}
    )
    """Resources of each feeder pod, for all of its processes together. Ignored on one machine."""
    scratch: ScratchSpec = nested(ScratchSpec)
    """Disk of each feeder pod, and of the head, for data that the Dataset holds. Ignored on one machine."""
    image: Image | None = None
    """Image of the feeders and the Ray head. Left out: the trainer's, which then needs `dataloaderjob[feeder]`."""
    metadata: WorkloadMetadata = nested(WorkloadMetadata)
    """Labels and annotations of the feeders' Deployment."""
    template: PodTemplate = nested(PodTemplate)
    """Additions to the feeder pods: volumes, tolerations, ...

    A container named `feeder` adds to the feeders' own container (env, volumeMounts, ...).
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="replicas",
            use="minAvailable or more, or lower minAvailable (0 allows a job without feeders)",
            cel="self.replicas >= self.minAvailable",
            found="string(self.replicas) + ', below minAvailable ' + string(self.minAvailable)",
        ),
        Rule(
            field="processesPerPod",
            use=f"numbers whose product is at most {MAX_FEEDERS}",
            cel=f"self.replicas * self.processesPerPod <= {MAX_FEEDERS}",
            found="'replicas * processesPerPod = ' + string(self.replicas * self.processesPerPod)",
        ),
        *owned_field_rules(CONTAINER, OWNED),
        *RAY_NODE_ENV,
    )

    @property
    def count(self) -> int:
        """Feeder processes in all."""
        return self.replicas * self.processes_per_pod
