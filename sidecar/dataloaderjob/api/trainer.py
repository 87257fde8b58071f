"""spec.trainers, the trainers' pods as a Kubernetes pod template, and spec.sidecar, the process next to them. Pure."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from dataloaderjob.api.attach import AttachSpec
from dataloaderjob.api.base import (
    MIB,
    Free,
    Immutable,
    Model,
    Resources,
    Rule,
    Whole,
    in_quotes,
    nested,
    resources,
)
from dataloaderjob.api.failures import FailurePolicy
from dataloaderjob.api.pods import (
    CONTAINERS,
    RESERVED_PREFIX,
    Container,
    Containers,
    Env,
    Image,
    PodSpec,
    PodTemplate,
    Port,
    ScratchSpec,
    WorkloadMetadata,
    reserved_env_rule,
    restart_rule,
)

SET_FOR_TRAINERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT",
)  # fmt: skip
"""Environment variables that `TrainerSpec.launch_environment` sets. Others that torchrun reads, such as
PET_MAX_RESTARTS, are left to the user."""
FIRST_POOL_OVERHEAD_NBYTES = 64 * MIB
"""Memory that a sidecar with one pool needs in addition to the pool (a measured bound of 40 MB, plus headroom)."""
FURTHER_POOL_OVERHEAD_NBYTES = 16 * MIB
"""Memory that a sidecar needs for each further pool, in addition to the pool."""
_FIRST = "template.spec.containers[0]"
_NO_TEMPLATE = PodTemplate()


class TrainerPodSpec(PodSpec):
    """The trainer pods' spec. The first container is the trainer."""

    containers: Containers = Field(min_length=1)
    """The trainer, then any others."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        restart_rule("Never", "spec.trainers.job.failurePolicy limits the restarts of all trainers"),
    )


class TrainerPodTemplate(PodTemplate):
    """Labels, annotations and spec of the trainer pods."""

    spec: TrainerPodSpec
    """The pods' spec."""


class TrainerSpec(Model):
    """The trainers: `replicas` pods. Each pod runs the command once."""

    replicas: Whole = Field(default=1, ge=1, le=1_024)
    """Number of trainer pods. On one machine, the number of times that the command is started."""
    processes_per_pod: Whole = Field(default=1, ge=1, le=64)
    """Trainer processes (ranks) that one command starts, as torchrun does. Each process gets a pool."""
    master_port: Port | None = None
    """Port on which the first rank listens for the others. If omitted: 29500; with hostNetwork, derived from the job's
    uid.

    Ignored on one machine.
    """
    metadata: WorkloadMetadata = nested(WorkloadMetadata)
    """Labels and annotations of the trainers' Job. Changes take effect at the next start."""
    failure_policy: FailurePolicy = nested(FailurePolicy)
    """Response to trainer failures. Ignored on one machine."""
    template: TrainerPodTemplate
    """Template of the trainer pods. Its first container is the trainer."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field=f"{_FIRST}.command",
            use='the training command, such as ["python", "train.py"], or omit it to use the image\'s own',
            cel=f"!has(self.{_FIRST}.command) || size(self.{_FIRST}.command) == 0"
            f" || self.{_FIRST}.command[0] != ''",
            found="'an empty program'",
        ),
        Rule(
            field=f"{_FIRST}.image",
            use="the image with your training code",
            cel=f"has(self.{_FIRST}.image)",
            found="'no image'",
            only_on_a_cluster=True,
        ),
        Rule(
            field=f"{CONTAINERS}.name",
            use=f"a name that does not begin with {RESERVED_PREFIX}, which the operator uses",
            cel=f"!item.name.startsWith('{RESERVED_PREFIX}')",
            found=in_quotes("item.name"),
        ),
        reserved_env_rule(
            env=f"{CONTAINERS}.env",
            names=SET_FOR_TRAINERS,
            prefixes=("DATALOADERJOB_",),
            use=(
                "another name, because this one is derived from spec.trainers.job.replicas and "
                "processesPerPod"
            ),
        ),
    )
    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = (
        Immutable(field="replicas", use="a new job, because the ranks are fixed when trainers start"),
        Immutable(field="processesPerPod", use="a new job, because the ranks are fixed when trainers start"),
    )

    @property
    def container(self) -> Container:
        """The trainer's own container."""
        return self.template.spec.containers[0]

    def launch_environment(self, *, replica: int, master_addr: str, master_port: int) -> dict[str, str]:
        """Returns the environment variables of one replica's command: torchrun's, plus those of a rank if each replica
        is a single process."""
        env = {
            "PET_NNODES": str(self.replicas),
            "PET_NODE_RANK": str(replica),
            "PET_NPROC_PER_NODE": str(self.processes_per_pod),
            "PET_MASTER_ADDR": master_addr,
            "PET_MASTER_PORT": str(master_port),
        }
        if self.processes_per_pod == 1:
            env |= {
                "RANK": str(replica),
                "WORLD_SIZE": str(self.replicas),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": master_addr,
                "MASTER_PORT": str(master_port),
            }
        return env


class TrainersSpec(Model):
    """The trainers: either `job` or `attach`."""

    job: TrainerSpec | None = None
    """Pods that the operator creates as one Job."""
    attach: AttachSpec | None = None
    """Pods that other controllers create, such as those of a TrainJob, JobSet or RayJob."""

    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = (
        Immutable(
            field="attach",
            use="a new job, because a job's trainers are either created or attached",
            presence_only=True,
        ),
    )

    @property
    def attached(self) -> bool:
        """True if other controllers create the trainers' pods."""
        return self.job is None

    @property
    def own(self) -> TrainerSpec:
        """The trainers that the operator creates. Raises ValueError if there are none."""
        if self.job is None:
            raise ValueError("this job's trainers are attached, so spec.trainers.job is not set")
        return self.job

    @property
    def replicas(self) -> int:
        """Number of pods that the operator creates; 0 if trainers are attached."""
        return 0 if self.job is None else self.job.replicas

    @property
    def processes_per_pod(self) -> int:
        """Maximum number of trainer processes in each pod."""
        spec = self.job or self.attach
        return 1 if spec is None else spec.processes_per_pod

    @property
    def template(self) -> PodTemplate:
        """The template of the operator's trainer pods; an empty one if trainers are attached."""
        return _NO_TEMPLATE if self.job is None else self.job.template


class SidecarSpec(Model):
    """The sidecar: one for each trainer pod, with one pool for each trainer process. Its other settings are in
    `loader`."""

    image: Image | None = None
    """Image of the sidecar. If omitted: the operator's default. Ignored on one machine."""
    scratch: ScratchSpec = nested(ScratchSpec)
    """Disk space of each trainer pod for data that the Dataset holds, until feeders have received it. Ignored on one
    machine."""
    metrics_port: Port | None = None
    """Port of the sidecar's metrics and probe. If omitted: 9400; with hostNetwork, derived from the job's uid.

    Ignored on one machine.
    """
    resources: Resources = resources(requests={"cpu": "250m"}, limits={"cpu": "2"})
    """Resources of the sidecar. If memory is omitted, the sidecar gets enough for the pools and for itself."""
    env: Env = ()
    """Environment variables of the sidecar."""
    security_context: Free = Field(default_factory=dict)
    """Fields of the sidecar's securityContext, such as `runAsUser`. They override the operator's. Ignored on one
    machine."""

    RULES: ClassVar[tuple[Rule, ...]] = (reserved_env_rule(prefixes=("DATALOADERJOB_",)),)
    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = (
        Immutable(
            field="metricsPort",
            use="a new job, because the sidecars of running trainers are probed on that port",
        ),
    )

    def overhead_nbytes(self, num_pools: int) -> int:
        """Returns the memory that the sidecar needs in addition to its pools."""
        return FIRST_POOL_OVERHEAD_NBYTES + (num_pools - 1) * FURTHER_POOL_OVERHEAD_NBYTES
