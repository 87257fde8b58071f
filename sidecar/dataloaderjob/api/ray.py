"""spec.ray: the Ray cluster that places feeders. Pure."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from dataloaderjob.api.base import (
    LEAVE_UNSET,
    Bytes,
    Model,
    Resources,
    Rule,
    Use,
    Whole,
    in_quotes,
    nested,
    resources,
)
from dataloaderjob.api.pods import RAY_NODE_ENV, PodTemplate, WorkloadMetadata, owned_field_rules
from dataloaderjob.core import settings

HEAD_CONTAINER = "head"
"""Name of the container of Ray's head. `template` may extend it."""
SUPERVISOR_CONTAINER = "supervisor"
"""Name of the supervisor's container in the same pod. The API server rejects a second container of this name."""
OF_HEAD = (HEAD_CONTAINER, SUPERVISOR_CONTAINER)
"""The operator's containers in the head's pod, which run the same image."""
HEAD_OWNED = {
    "command": f"{LEAVE_UNSET}, because the operator starts the head",
    "args": f"{LEAVE_UNSET}, because the operator starts the head",
    "image": "spec.feeders.image",
    "resources": "spec.ray.managed.head.resources",
}
MIN_WINDOW_MS = 1_000
MAX_WINDOW_MS = 3_600_000
RAY_TOKEN_KEY = "auth_token"  # noqa: S105  the name of a key
"""Key of the token in a Secret that KubeRay makes."""
OLDEST_RAY = "2.56"
_SUPPORTED = "^(([3-9]|[1-9][0-9]+)[.]|2[.](5[6-9]|[6-9][0-9]|[1-9][0-9]{2}))"
"""Matches versions from OLDEST_RAY on. It contains no backslash, so that CEL needs no escapes."""


class HealthCheck(Model):
    """Settings that determine when Ray's GCS declares a node dead.

    A node that refuses connections is dead after failureThreshold * periodMs (30 s). A node that hangs is dead after
    failureThreshold * (periodMs + timeoutMs) (150 s). With Ray's own defaults, these times are 15 s and 65 s, which is
    too short for nodes whose CPUs are all busy. Long before a node is declared dead, its batches are requested from
    other feeders.
    """

    initial_delay_ms: Whole = Field(default=10_000, ge=0, le=600_000)
    """Time from a node's registration to its first check. Ray's own default is 5000."""
    period_ms: Whole = Field(default=5_000, ge=100, le=60_000)
    """Time between two checks. Ray's own default is 3000."""
    timeout_ms: Whole = Field(default=20_000, ge=100, le=300_000)
    """Time that a check waits for an answer. Ray's own default is 10000."""
    failure_threshold: Whole = Field(default=6, ge=1, le=1_000)
    """Number of consecutive failed checks after which a node counts as dead. Ray's own default is 5."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="failureThreshold",
            use="values whose product is at least 1000 ms, because a node may pause that long without being dead",
            cel=f"self.failureThreshold * self.periodMs >= {MIN_WINDOW_MS}",
            found="'failureThreshold * periodMs = ' + string(self.failureThreshold * self.periodMs) + ' ms'",
        ),
        Rule(
            field="failureThreshold",
            use="values that detect a dead node within 3600000 ms (an hour)",
            cel=f"self.failureThreshold * (self.periodMs + self.timeoutMs) <= {MAX_WINDOW_MS}",
            found="'failureThreshold * (periodMs + timeoutMs) = ' +"
            " string(self.failureThreshold * (self.periodMs + self.timeoutMs)) + ' ms'",
        ),
    )


class RayTuning(Model):
    """Ray timeouts for the processes of the head and of all feeders."""

    worker_register_timeout_seconds: Whole = Field(default=120, ge=1, le=3_600)
    """Time that a worker process may take to start, including imports, before Ray kills it and starts another.

    Ray's own default is 60; a cold import of torch from a network disk takes longer than that.
    """
    health_check: HealthCheck = nested(HealthCheck)
    """Settings that determine when a node counts as dead."""

    def settings(self) -> settings.RayTuning:
        """Converts these timeouts to the units that the processes use."""
        check = self.health_check
        return settings.RayTuning(
            worker_register_timeout_s=self.worker_register_timeout_seconds,
            health_check_initial_delay_s=check.initial_delay_ms / 1000,
            health_check_period_s=check.period_ms / 1000,
            health_check_timeout_s=check.timeout_ms / 1000,
            health_check_failure_threshold=check.failure_threshold,
        )


class RayTasks(Model):
    """Room for Ray tasks of user code, such as those of Ray Data, in each feeder pod or on one machine. If set, user
    code in feeders has access to the token of the job's Ray cluster."""

    cpus: Whole = Field(ge=1, le=1_024)
    """Number of one-CPU tasks that may run at a time. They share the resources in `spec.feeders.resources`."""
    object_store: Bytes | None = None
    """Shared memory for the tasks' results, taken from the memory in `spec.feeders.resources`. If omitted: 80Mi."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="objectStore",
            use="at least 80Mi, such as 1Gi",
            cel="!has(self.objectStore) || !quantity(string(self.objectStore)).isLessThan(quantity('80Mi'))",
            found="string(self.objectStore)",
        ),
    )


class HeadSpec(Model):
    """The pod of Ray's head."""

    resources: Resources = resources(
        requests={"cpu": "500m", "memory": "2Gi"}, limits={"cpu": "2", "memory": "2Gi"}
    )
    """Resources of the head. Ignored on one machine."""
    metadata: WorkloadMetadata = nested(WorkloadMetadata)
    """Labels and annotations of the head's Deployment."""
    template: PodTemplate = nested(PodTemplate)
    """Additions to the head's pod, such as nodeSelector, tolerations and priorityClassName. The feeders' additions are
    not applied to the head.

    A container named `head` extends Ray's own container (env, volumeMounts, ...). Ignored on one machine.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        *owned_field_rules(HEAD_CONTAINER, HEAD_OWNED),
        *RAY_NODE_ENV,
        Rule(
            field="template.spec.hostNetwork",
            use="false, because sidecars, feeders and the operator find the head through its Service",
            cel="!has(self.template.spec.hostNetwork) || !self.template.spec.hostNetwork",
            found="'true'",
        ),
    )


class ManagedRaySpec(Model):
    """The Ray cluster that is created for the job."""

    version: Annotated[
        str | None,
        Field(max_length=32, pattern=r"^[1-9][0-9]{0,2}\.[0-9]{1,3}(\.[0-9]{1,3})?$"),
        Use('a version in quotes such as "2.60.0"'),
    ] = None
    """Version of Ray in the feeders' image or on this machine. It is checked if given; nothing is installed."""
    tuning: RayTuning = nested(RayTuning)
    """Ray timeouts."""
    tasks: RayTasks | None = None
    """Room for Ray tasks of user code. If omitted: none, and user code cannot reach the job's Ray cluster."""
    head: HeadSpec = nested(HeadSpec)
    """The pod of Ray's head, which runs the supervisor but no feeders. It uses the feeders' image, and keeps that
    image while it serves."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="version",
            use=f"Ray {OLDEST_RAY} or newer",
            cel=f"!has(self.version) || self.version.matches('{_SUPPORTED}')",
            found=in_quotes("self.version"),
        ),
    )

    def room(self) -> settings.RayTasks:
        """Returns the room that each node with feeders leaves for tasks, in the units that the processes use."""
        if self.tasks is None:
            return settings.RayTasks()
        if self.tasks.object_store is None:
            return settings.RayTasks(cpus=self.tasks.cpus)
        return settings.RayTasks(cpus=self.tasks.cpus, object_store_nbytes=self.tasks.object_store.nbytes)


class TokenSecretRef(Model):
    """The Secret with a Ray cluster's token, in the job's namespace."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"),
        Use("the name of a Secret in the job's namespace"),
    ]
    """Name of the Secret. For a RayCluster with `authOptions.mode: token`, KubeRay names the Secret after the
    RayCluster."""
    key: Annotated[
        str,
        Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$"),
        Use("a key of that Secret"),
    ] = RAY_TOKEN_KEY
    """Key of the token in the Secret. The default is KubeRay's."""


class ExternalRaySpec(Model):
    """A Ray cluster that exists independently of the job. Feeders run there as actors, placed by
    `spec.feeders.resources`.

    Its nodes need the same Ray version and Python minor version as the job, and `dataloaderjob[feeder]`. The job
    connects to it as a driver. On one machine, this machine must be one of the nodes, and Ray's own environment
    variables (RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH) provide the cluster's token.
    """

    address: Annotated[
        str | None,
        Field(max_length=260, pattern=r"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[1-9][0-9]{0,4}$"),
        Use(
            'host:port of the head\'s GCS, such as "10.0.0.5:6379"; "auto" and ray:// addresses are not supported'
        ),
    ] = None
    """Host and port of the GCS of the cluster's head, such as `10.0.0.5:6379`."""
    ray_cluster: Annotated[
        str | None,
        Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"),
        Use("the name of a RayCluster in the job's namespace"),
    ] = None
    """Name of a KubeRay RayCluster in the job's namespace, to use instead of the address. The job waits until the
    Service of the RayCluster's head exists. Not supported on one machine."""
    token_secret_ref: TokenSecretRef | None = None
    """The Secret with the cluster's token. If omitted: the cluster has none. Ignored on one machine."""
    resources: Resources = resources(
        requests={"cpu": "500m", "memory": "2Gi"}, limits={"cpu": "2", "memory": "2Gi"}
    )
    """Resources of the supervisor's pod, which joins the cluster as a node without room for feeders. The pod uses the
    feeders' image. Ignored on one machine."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="address",
            use="either address (the host:port of the head's GCS) or rayCluster (the name of a RayCluster), not both",
            cel="has(self.address) != has(self.rayCluster)",
            found="(has(self.address) ? 'address and rayCluster' : 'neither address nor rayCluster')",
        ),
    )


class RaySpec(Model):
    """The Ray cluster of the job: `managed` or `external`. If omitted: `managed`, with its defaults."""

    managed: ManagedRaySpec | None = None
    """A cluster that is created for the job and ends with it."""
    external: ExternalRaySpec | None = None
    """An existing cluster, which the job shares with others."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="external",
            use="either managed or external, because a job has one Ray cluster",
            cel="!has(self.external) || !has(self.managed)",
            found="'both managed and external'",
        ),
    )

    @property
    def head(self) -> HeadSpec:
        """Settings of the supervisor's pod, for a managed or an external cluster."""
        if self.external is None:
            return self.own.head
        return _MANAGED.head.model_copy(update={"resources": self.external.resources})

    @property
    def own(self) -> ManagedRaySpec:
        """Settings of the job's own cluster: the defaults, unless `managed` is set."""
        return _MANAGED if self.managed is None else self.managed


_MANAGED = ManagedRaySpec()
