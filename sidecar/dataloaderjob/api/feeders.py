"""spec.feeders: the processes that run Dataset and collate_fn; spec.ray: the Ray cluster that places them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from dataloaderjob.api.base import Model, Path, Resources, Rule, Use, Whole, nested, resources
from dataloaderjob.api.trainer import Image, PodTemplate, reserved_env_rule
from dataloaderjob.core import settings
from dataloaderjob.core.supervision import MAX_FEEDERS

CONTAINER = "feeder"
"""Name of the container in which feeders run; `template` may add to it."""
OWNED = {
    "command": "nothing: the operator starts the feeders",
    "args": "nothing: the operator starts the feeders",
    "image": "spec.feeders.image",
    "resources": "spec.feeders.resources",
}


def _min_over_max(feeders: FeedersSpec) -> Iterator[tuple[Path, str]]:
    if feeders.max_replicas is not None and feeders.min_replicas > feeders.max_replicas:
        yield ("minReplicas",), f"{feeders.min_replicas}, above maxReplicas {feeders.max_replicas}"


def _too_few(feeders: FeedersSpec) -> Iterator[tuple[Path, str]]:
    if feeders.replicas < feeders.min_replicas:
        yield ("replicas",), f"{feeders.replicas}, below minReplicas {feeders.min_replicas}"


def _too_many(feeders: FeedersSpec) -> Iterator[tuple[Path, str]]:
    if feeders.max_replicas is not None and feeders.replicas > feeders.max_replicas:
        yield ("replicas",), f"{feeders.replicas}, above maxReplicas {feeders.max_replicas}"


def _too_many_processes(feeders: FeedersSpec) -> Iterator[tuple[Path, str]]:
    if feeders.count > MAX_FEEDERS:
        yield ("processesPerPod",), f"replicas * processesPerPod = {feeders.count}"


def _owned_field(field: str) -> Rule:
    def check(feeders: FeedersSpec) -> Iterator[tuple[Path, str]]:
        for i, container in enumerate(feeders.template.spec.containers):
            if container.name == CONTAINER and field in container.model_fields_set:
                yield ("template", "spec", "containers", i, field), f"{field} of the container {CONTAINER}"

    containers = "self.template.spec.containers"
    return Rule(
        field="template",
        use=OWNED[field],
        cel=f"!has({containers}) || {containers}.all(c, c.name != '{CONTAINER}' || !has(c.{field}))",
        found=f"'{field} of the container {CONTAINER}'",
        check=check,
    )


class FeedersSpec(Model):
    """Feeders: one Ray actor each, which has processes of its own for user code."""

    replicas: Whole = Field(default=1, ge=0, le=1_024)
    """Feeder pods; on one machine, a factor of the number of feeders. May change while the job runs.

    `kubectl scale dlj` changes it.
    """
    min_replicas: Whole = Field(default=1, ge=0, le=1_024)
    """Least that `replicas` may be set to. 0 allows a job without feeders, whose trainers wait."""
    max_replicas: Whole | None = Field(default=None, ge=1, le=1_024)
    """Most that `replicas` may be set to. Left out: no bound but that of `replicas`."""
    processes_per_pod: Whole = Field(default=1, ge=1, le=64)
    """Feeders in each pod, replicas * processesPerPod in all. They share one copy of the dataset's arrays."""
    resources: Resources = resources(
        requests={"cpu": "1", "memory": "2Gi"}, limits={"cpu": "1", "memory": "2Gi"}
    )
    """Resources of each feeder pod, all of its processes together. Ignored on one machine."""
    image: Image | None = None
    """Image of feeders and Ray head. Left out: the trainer's, which then needs `dataloaderjob[feeder]`."""
    template: PodTemplate = nested(PodTemplate)
    """What to add to the feeder pods: volumes, tolerations, ...

    A container named `feeder` adds to the feeders' own (env, volumeMounts, ...).
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="minReplicas",
            use="a number up to maxReplicas",
            cel="!has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            found="string(self.minReplicas) + ', above maxReplicas ' + string(self.maxReplicas)",
            check=_min_over_max,
        ),
        Rule(
            field="replicas",
            use="minReplicas or more, or lower minReplicas (0 allows a job without feeders)",
            cel="self.replicas >= self.minReplicas",
            found="string(self.replicas) + ', below minReplicas ' + string(self.minReplicas)",
            check=_too_few,
        ),
        Rule(
            field="replicas",
            use="maxReplicas or less, or raise maxReplicas",
            cel="!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            found="string(self.replicas) + ', above maxReplicas ' + string(self.maxReplicas)",
            check=_too_many,
        ),
        Rule(
            field="processesPerPod",
            use=f"numbers whose product is at most {MAX_FEEDERS}",
            cel=f"self.replicas * self.processesPerPod <= {MAX_FEEDERS}",
            found="'replicas * processesPerPod = ' + string(self.replicas * self.processesPerPod)",
            check=_too_many_processes,
        ),
        *(_owned_field(field) for field in OWNED),
        reserved_env_rule(
            names=("RAY_ADDRESS",),
            prefixes=("DATALOADERJOB_", "RAY_AUTH_"),
            use="another name: dataloaderjob sets this one itself",
        ),
        reserved_env_rule(
            names=("RAY_worker_register_timeout_seconds",),
            prefixes=("RAY_health_check_",),
            use="spec.ray.tuning, which sets it for the head and all feeders alike",
        ),
    )

    @property
    def count(self) -> int:
        """Feeder processes in all."""
        return self.replicas * self.processes_per_pod


MIN_WINDOW_MS = 1_000
MAX_WINDOW_MS = 3_600_000
OLDEST_RAY = "2.56"
_SUPPORTED = "^(([3-9]|[1-9][0-9]+)[.]|2[.](5[6-9]|[6-9][0-9]|[1-9][0-9]{2}))"
"""Versions from OLDEST_RAY on, as CEL sees them (no backslash, so that CEL needs no escapes)."""


def _short_window(check: HealthCheck) -> Iterator[tuple[Path, str]]:
    window_ms = check.failure_threshold * check.period_ms
    if window_ms < MIN_WINDOW_MS:
        yield ("failureThreshold",), f"failureThreshold * periodMs = {window_ms} ms"


def _long_window(check: HealthCheck) -> Iterator[tuple[Path, str]]:
    window_ms = check.failure_threshold * (check.period_ms + check.timeout_ms)
    if window_ms > MAX_WINDOW_MS:
        yield ("failureThreshold",), f"failureThreshold * (periodMs + timeoutMs) = {window_ms} ms"


class HealthCheck(Model):
    """When Ray's GCS calls a node dead.

    A node that refuses connections is dead after failureThreshold * periodMs (30 s), one that hangs
    after failureThreshold * (periodMs + timeoutMs) (150 s): Ray's own 15 s and 65 s are too short for
    nodes whose CPUs are all busy. The batches of a dead node are asked for elsewhere long before that.
    `numHeartbeatsTimeout` is not a field: Ray replaced it by these four, and two names of one number
    could contradict each other. Its successor is `failureThreshold`.
    """

    initial_delay_ms: Whole = Field(default=10_000, ge=0, le=600_000)
    """Time from a node's registration to its first check. Ray's own default is 5000."""
    period_ms: Whole = Field(default=5_000, ge=100, le=60_000)
    """Time between two checks. Ray's own default is 3000."""
    timeout_ms: Whole = Field(default=20_000, ge=100, le=300_000)
    """How long a check waits for its answer. Ray's own default is 10000."""
    failure_threshold: Whole = Field(default=6, ge=1, le=1_000)
    """Failed checks in a row after which a node is dead. Ray's own default is 5."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="failureThreshold",
            use="values whose product is at least 1000 ms: a shorter pause is no death",
            cel=f"self.failureThreshold * self.periodMs >= {MIN_WINDOW_MS}",
            found="'failureThreshold * periodMs = ' + string(self.failureThreshold * self.periodMs) + ' ms'",
            check=_short_window,
        ),
        Rule(
            field="failureThreshold",
            use="values that find a dead node within 3600000 ms (an hour)",
            cel=f"self.failureThreshold * (self.periodMs + self.timeoutMs) <= {MAX_WINDOW_MS}",
            found="'failureThreshold * (periodMs + timeoutMs) = ' +"
            " string(self.failureThreshold * (self.periodMs + self.timeoutMs)) + ' ms'",
            check=_long_window,
        ),
    )


class RayTuning(Model):
    """Timeouts of Ray, in force in the head's and all feeders' processes."""

    worker_register_timeout_seconds: Whole = Field(default=120, ge=1, le=3_600)
    """How long a worker process may take to start, imports included, before Ray ends it and starts another.

    Ray's own default is 60; a cold import of torch from a network disk takes longer than that.
    """
    health_check: HealthCheck = nested(HealthCheck)
    """When a node counts as dead."""

    def settings(self) -> settings.RayTuning:
        """The same in the units of the processes."""
        check = self.health_check
        return settings.RayTuning(
            worker_register_timeout_s=self.worker_register_timeout_seconds,
            health_check_initial_delay_s=check.initial_delay_ms / 1000,
            health_check_period_s=check.period_ms / 1000,
            health_check_timeout_s=check.timeout_ms / 1000,
            health_check_failure_threshold=check.failure_threshold,
        )


def _old_ray(ray: RaySpec) -> Iterator[tuple[Path, str]]:
    if ray.version is None:
        return
    major, minor = (int(part) for part in ray.version.split(".")[:2])
    if (major, minor) < (2, 56):
        yield ("version",), f'"{ray.version}"'


class RaySpec(Model):
    """The Ray cluster of the job."""

    version: Annotated[
        str | None,
        Field(max_length=32, pattern=r"^[1-9][0-9]{0,2}\.[0-9]{1,3}(\.[0-9]{1,3})?$"),
        Use('a version in quotes such as "2.60.0"'),
    ] = None
    """Version of Ray in the feeders' image or on this machine. Checked where given; nothing is installed."""
    tuning: RayTuning = nested(RayTuning)
    """Timeouts of Ray."""
    head_resources: Resources = resources(
        requests={"cpu": "500m", "memory": "2Gi"}, limits={"cpu": "2", "memory": "2Gi"}
    )
    """Resources of the Ray head, which runs the supervisor and no feeder. It uses the feeders' image."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="version",
            use=f"Ray {OLDEST_RAY} or newer",
            cel=f"!has(self.version) || self.version.matches('{_SUPPORTED}')",
            found="self.version",
            check=_old_ray,
        ),
    )
