"""status of a DataLoaderJob: what the operator reports. Pure.

Truth is in the conditions; `phase` is derived from them, for people. Metrics are strings of few digits, so
that a status is not written anew for noise.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from dataloaderjob.api.base import Model, Whole, nested


class ConditionType(StrEnum):
    """All of them are there from the first reconcile on."""

    READY = "Ready"
    """Head, sidecars and at least `minAvailable` feeders serve, and the trainers run; or they all ended with exit code
    0."""
    HEAD_READY = "HeadReady"
    """The Ray head answers, and the supervisor in it."""
    FEEDERS_READY = "FeedersReady"
    """Feeders of at least `minAvailable` pods serve, as the supervisor says, and no trainer got an error from them
    that no batch has followed yet. Else the reason says why, such as WorkerRegisterTimeout or ModuleMissing."""
    SIDECARS_READY = "SidecarsReady"
    """The sidecar of every trainer pod listens."""
    TRAINERS_READY = "TrainersReady"
    """The containers of every trainer pod run, or ended with exit code 0."""
    PROGRESSING = "Progressing"
    """The job moves towards what its spec asks for."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true and every pod is gone."""
    COMPLETE = "Complete"
    """All trainers ended with exit code 0."""
    FAILED = "Failed"
    """The job ended otherwise; the reason says how."""
    STALLED = "Stalled"
    """The job has failed, or waits for another spec: Helm and Flux wait no longer for what is stalled."""


class Phase(StrEnum):
    """One word for `kubectl get`."""

    PENDING = "Pending"
    """The operator has not written a status yet."""
    STARTING = "Starting"
    """Pods are made or start; not everything serves yet."""
    QUEUED = "Queued"
    """Pods wait for a node, or for who holds them back, such as Kueue; `Ready` has the scheduler's words."""
    RUNNING = "Running"
    """Head, sidecars and enough feeders serve, and the trainers run."""
    DEGRADED = "Degraded"
    """Something that served does not, or the trainers are started anew; `Ready` says what is missing."""
    SUSPENDING = "Suspending"
    """`spec.suspend` is true and pods are still there."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true and every pod is gone."""
    COMPLETE = "Complete"
    """All trainers ended with exit code 0."""
    FAILED = "Failed"
    """The job ended otherwise."""


BY_TYPE: Any = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
Moment = Annotated[str | None, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Metric = Annotated[str, Field(max_length=32)]
"""A number with its digits already cut, such as 1.24."""


class Condition(Model):
    """One fact about the job, as Kubernetes has conditions."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    """Which fact."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, for people: the pod, the container and the cause."""
    observed_generation: Whole = Field(default=0, ge=0)
    """The generation of the spec that this is about."""
    last_transition_time: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
    """When `status` changed last."""


class FeedersStatus(Model):
    """The feeders."""

    desired: Whole = Field(default=0, ge=0)
    """Pods asked for."""
    replicas: Whole = Field(default=0, ge=0)
    """Pods that there are."""
    ready: Whole = Field(default=0, ge=0)
    """Pods whose feeders serve: as many as the supervisor has feeders for, whole pods only."""
    summary: Metric = "0/0"
    """ready/desired, for `kubectl get`."""


class TrainersStatus(Model):
    """The trainers."""

    desired: Whole = Field(default=0, ge=0)
    """Pods asked for."""
    active: Whole = Field(default=0, ge=0)
    """Pods that run."""
    succeeded: Whole = Field(default=0, ge=0)
    """Pods that ended with exit code 0."""
    restarts: Whole = Field(default=0, ge=0)
    """How often all were started anew; the last one's number is in the names of its Job and pods."""
    failures: Whole = Field(default=0, ge=0)
    """Restarts that count against `failurePolicy.maxRestarts`, since the last progress."""
    disruptions: Whole = Field(default=0, ge=0)
    """Restarts that do not, since the last progress."""
    next_start: Moment = None
    """When they are started anew at the earliest."""
    image: Annotated[str, Field(max_length=1024)] = ""
    """The trainers' own image."""
    sidecar_image: Annotated[str, Field(max_length=1024)] = ""
    """The operator's sidecar image when `image` was new: it goes with it, where the spec names no other."""
    summary: Metric = "0/0"
    """Pods that run or ended with exit code 0, of those asked for; for `kubectl get`."""


class LoaderStatus(Model):
    """What the loader does, from the supervisor, over some 10 s.

    Written when it changes by more than 5 %, once a minute at most, with n jobs in the cluster every n/4 s. Empty
    while nobody knows: the supervisor has not answered yet, or answers no more. After the end these are the last
    metrics that were written, not those of the whole job; a suspended job has none.
    """

    observed_time: Moment = None
    """When they were measured; while an operator works, they have not changed by more than 5 % since, or are empty."""
    batches_per_second: Metric = ""
    """Batches that trainers take, of all ranks together."""
    gb_per_second: Metric = ""
    """10^9 bytes of batches, of all ranks together."""
    stall_percent: Metric = ""
    """Share of the time that trainers wait for a batch."""
    occupancy_percent: Metric = ""
    """Share of the pools that ready and lent batches take."""


class RayStatus(Model):
    """What is in force in the Ray cluster, as the GCS in its head says."""

    version: Annotated[str, Field(max_length=32)] = ""
    """Ray's version."""
    worker_register_timeout_seconds: Whole = Field(default=0, ge=0)
    """worker_register_timeout_seconds of raylets and GCS."""
    health_check_period_ms: Whole = Field(default=0, ge=0)
    """health_check_period_ms of the GCS."""
    health_check_timeout_ms: Whole = Field(default=0, ge=0)
    """health_check_timeout_ms of the GCS."""
    health_check_failure_threshold: Whole = Field(default=0, ge=0)
    """health_check_failure_threshold of the GCS."""


class DataLoaderJobStatus(Model):
    """What the operator saw last."""

    observed_generation: Whole = Field(default=0, ge=0)
    """The generation of the spec that this is about."""
    phase: Annotated[Phase, WithJsonSchema({"type": "string"})] = Phase.PENDING  # others may follow
    """One word for the conditions."""
    reason: Annotated[str, Field(max_length=128)] = ""
    """Why the job is not as asked for, in the word of the condition that says more; empty if it is."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=BY_TYPE)] = ()
    """Facts about the job."""
    feeders: FeedersStatus = nested(FeedersStatus)
    """The feeders."""
    trainers: TrainersStatus = nested(TrainersStatus)
    """The trainers."""
    loader: LoaderStatus = nested(LoaderStatus)
    """What the loader does."""
    ray: RayStatus = nested(RayStatus)
    """What is in force in Ray."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the feeder pods, for the scale subresource."""
    start_time: Moment = None
    """When the job was seen first, or resumed."""
    scheduled_time: Moment = None
    """When the last of what it needs had a node: the startup deadline counts from here."""
    serving_time: Moment = None
    """When all of it served first since the start: the startup deadline is met."""
    completion_time: Moment = None
    """When it ended."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """None if it has not been written yet."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        """Whether this condition is known to be true."""
        return any(condition.type == kind and condition.status == "True" for condition in self.conditions)
