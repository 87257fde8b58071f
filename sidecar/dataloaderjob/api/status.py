"""status of a DataLoaderJob, as reported by the operator. Pure.

The conditions are authoritative; `phase` is derived from them, for people. Metrics are strings of few digits, so
that noise does not cause another write of the status.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from dataloaderjob.api.base import Model, Whole, nested


class ConditionType(StrEnum):
    """Types of conditions. All of them exist from the first reconcile on."""

    READY = "Ready"
    """Head, sidecars and at least `minAvailable` feeders serve, and the trainers run; or all trainers ended with exit
    code 0."""
    HEAD_READY = "HeadReady"
    """The Ray head and the supervisor in it answer."""
    FEEDERS_READY = "FeedersReady"
    """The supervisor reports that feeders of at least `minAvailable` pods serve, and a batch has followed each error
    that a trainer got from them. Otherwise the reason is the cause, such as WorkerRegisterTimeout or ModuleMissing."""
    SIDECARS_READY = "SidecarsReady"
    """The sidecar of every trainer pod listens."""
    TRAINERS_READY = "TrainersReady"
    """The containers of every trainer pod run, or ended with exit code 0."""
    PROGRESSING = "Progressing"
    """The job is moving towards the state in its spec."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true and every pod is gone."""
    COMPLETE = "Complete"
    """All trainers ended with exit code 0."""
    FAILED = "Failed"
    """The job ended in any other way, which the reason names."""
    STALLED = "Stalled"
    """The job has failed, or cannot proceed without another spec: Helm and Flux stop waiting for a stalled object."""


class Phase(StrEnum):
    """One word for `kubectl get`."""

    PENDING = "Pending"
    """The operator has not written a status yet."""
    STARTING = "Starting"
    """Pods are being made or starting; not everything serves yet."""
    QUEUED = "Queued"
    """Pods wait for a node, or are held back, for example by Kueue; `Ready` quotes the scheduler."""
    RUNNING = "Running"
    """Head, sidecars and enough feeders serve, and the trainers run."""
    DEGRADED = "Degraded"
    """Something no longer serves, or the trainers are being restarted; `Ready` reports what is missing."""
    SUSPENDING = "Suspending"
    """`spec.suspend` is true and some pods still exist."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true and every pod is gone."""
    COMPLETE = "Complete"
    """All trainers ended with exit code 0."""
    FAILED = "Failed"
    """The job ended in any other way."""


BY_TYPE: Any = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
Moment = Annotated[str | None, Field(max_length=64, json_schema_extra={"format": "date-time"})]
Metric = Annotated[str, Field(max_length=32)]
"""A number already rounded to a few digits, such as 1.24."""


class Condition(Model):
    """One fact about the job, in the form of Kubernetes' conditions."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the fact."""
    status: Literal["True", "False", "Unknown"]
    """State of the fact."""
    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """Cause of this status, in one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Explanation for people: the pod, the container and the cause."""
    observed_generation: Whole = Field(default=0, ge=0)
    """Generation of the spec that this condition is about."""
    last_transition_time: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
    """Time of the last change of `status`."""


class FeedersStatus(Model):
    """State of the feeders."""

    desired: Whole = Field(default=0, ge=0)
    """Pods requested."""
    replicas: Whole = Field(default=0, ge=0)
    """Pods that exist."""
    ready: Whole = Field(default=0, ge=0)
    """Pods whose feeders serve: the supervisor's ready feeders, counted in whole pods."""
    summary: Metric = "0/0"
    """ready/desired, for `kubectl get`."""


class TrainersStatus(Model):
    """State of the trainers."""

    desired: Whole = Field(default=0, ge=0)
    """Pods requested."""
    active: Whole = Field(default=0, ge=0)
    """Pods that run."""
    succeeded: Whole = Field(default=0, ge=0)
    """Pods that ended with exit code 0."""
    restarts: Whole = Field(default=0, ge=0)
    """Number of restarts of all trainers so far. It is in the names of the current Job and pods."""
    failures: Whole = Field(default=0, ge=0)
    """Restarts since the last progress that count against `failurePolicy.maxRestarts`."""
    disruptions: Whole = Field(default=0, ge=0)
    """Restarts since the last progress that do not count."""
    next_start: Moment = None
    """Earliest time of the next restart."""
    image: Annotated[str, Field(max_length=1024)] = ""
    """The trainers' own image."""
    sidecar_image: Annotated[str, Field(max_length=1024)] = ""
    """The operator's sidecar image when `image` was new. It is used with `image` if the spec names no other."""
    summary: Metric = "0/0"
    """Pods that run or ended with exit code 0, out of those requested; for `kubectl get`."""


class LoaderStatus(Model):
    """Metrics of the loader, from the supervisor, over some 10 s.

    They are written if they change by more than 5 %, at most once a minute; with n jobs in the cluster, every n/4 s.
    They are empty if the supervisor has not answered yet, or no longer answers. After the end, they are the last
    metrics that were written, not the whole job's; a suspended job has none.
    """

    observed_time: Moment = None
    """Time of the measurement. While an operator works, the metrics have not changed by more than 5 % since, or are
    empty."""
    batches_per_second: Metric = ""
    """Batches that trainers take, over all ranks."""
    gb_per_second: Metric = ""
    """10^9 bytes of batches, over all ranks."""
    stall_percent: Metric = ""
    """Share of time that trainers spend waiting for a batch."""
    occupancy_percent: Metric = ""
    """Share of the pools that ready and lent batches occupy."""


class RayStatus(Model):
    """Settings in force in the Ray cluster, as reported by its head's GCS."""

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
    """State that the operator observed last."""

    observed_generation: Whole = Field(default=0, ge=0)
    """Generation of the spec that this status is about."""
    phase: Annotated[Phase, WithJsonSchema({"type": "string"})] = Phase.PENDING  # others may follow
    """Summary of the conditions in one word."""
    reason: Annotated[str, Field(max_length=128)] = ""
    """Reason why the job is not in the state of its spec, from the condition with details; empty if it is."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=BY_TYPE)] = ()
    """Facts about the job."""
    feeders: FeedersStatus = nested(FeedersStatus)
    """State of the feeders."""
    trainers: TrainersStatus = nested(TrainersStatus)
    """State of the trainers."""
    loader: LoaderStatus = nested(LoaderStatus)
    """Metrics of the loader."""
    ray: RayStatus = nested(RayStatus)
    """Settings in force in Ray."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the feeder pods, for the scale subresource."""
    start_time: Moment = None
    """Time when the job was first seen, or resumed."""
    scheduled_time: Moment = None
    """Time when the last of the needed pods had a node: the startup deadline counts from here."""
    serving_time: Moment = None
    """Time when everything first served since the start: the startup deadline is met."""
    completion_time: Moment = None
    """Time when the job ended."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """Returns the condition; None if it has not been written yet."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        """True if this condition is known to be true."""
        return any(condition.type == kind and condition.status == "True" for condition in self.conditions)
