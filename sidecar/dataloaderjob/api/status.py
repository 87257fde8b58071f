"""status of a DataLoaderJob, as reported by the operator. Pure.

The conditions are authoritative; `phase` is derived from them, for people. Metrics are strings with few
digits, so that noise does not cause status writes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from dataloaderjob.api.base import Free, Model, Whole, nested


class ConditionType(StrEnum):
    """Types of conditions. All of them exist from the first reconcile on."""

    READY = "Ready"
    """The head, the sidecars and at least `minAvailable` feeder pods serve, and the trainers run. Also true once all
    trainers have exited with code 0. With attached trainers: the job serves each pod that attaches, or will as soon as
    feeders have started."""
    HEAD_READY = "HeadReady"
    """The Ray head and the supervisor in it answer."""
    FEEDERS_READY = "FeedersReady"
    """The supervisor reports that the feeders of at least `minAvailable` pods serve. If a trainer received an error
    from them, a batch has followed. Otherwise, the reason names the cause, such as WorkerRegisterTimeout or
    ModuleMissing."""
    SIDECARS_READY = "SidecarsReady"
    """The sidecar of every trainer pod listens. Sidecars of attached pods have also reached the supervisor."""
    TRAINERS_READY = "TrainersReady"
    """The containers of every trainer pod run, or have exited with code 0. The condition `Ready` ignores the containers
    of attached pods, which other controllers restart."""
    PROGRESSING = "Progressing"
    """The job is moving toward the state that its spec describes."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true and every pod is gone."""
    COMPLETE = "Complete"
    """All trainers have exited with code 0, or the followed object has completed."""
    FAILED = "Failed"
    """The job ended in any other way, which the reason names."""
    STALLED = "Stalled"
    """The job has failed, or cannot proceed until its spec changes. Helm and Flux stop waiting for a stalled object."""
    INPUT_BOUND = "InputBound"
    """Training spent at least 5% of each step waiting for input, over the last minute. The reason names the
    bottleneck, and the message recommends a number of feeders. Unknown while there are too few batches to tell."""
    AUTOSCALING_ACTIVE = "AutoscalingActive"
    """The operator sets the number of feeders (`autoscaling.mode: Auto`). The message describes the last change. False
    in any other mode, or if a HorizontalPodAutoscaler targets the job."""


class Phase(StrEnum):
    """The state of the job in one word, for `kubectl get`."""

    PENDING = "Pending"
    """The operator has not written a status yet."""
    STARTING = "Starting"
    """Pods are being created or are starting; not all parts serve yet."""
    QUEUED = "Queued"
    """Pods wait for a node or are held back, for example by Kueue. The condition `Ready` quotes the scheduler."""
    RUNNING = "Running"
    """The head, the sidecars and enough feeders serve, and the trainers run."""
    WAITING = "Waiting"
    """No pod is attached, or the attached pods are starting. The head and the feeders serve or are starting."""
    SERVING = "Serving"
    """Pods are attached, and the head, the sidecars and enough feeders serve."""
    IDLE = "Idle"
    """No pod has been attached for `trainers.attach.idleSeconds`, so there are no feeders. The next pod to attach
    starts them again."""
    DEGRADED = "Degraded"
    """A part no longer serves, or the trainers are being restarted. The condition `Ready` reports what is missing."""
    SUSPENDING = "Suspending"
    """`spec.suspend` is true and some pods still exist."""
    SUSPENDED = "Suspended"
    """`spec.suspend` is true and every pod is gone."""
    COMPLETE = "Complete"
    """All trainers have exited with code 0."""
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
    """Cause of this status, as one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Explanation for people: the pod, the container and the cause."""
    observed_generation: Whole = Field(default=0, ge=0)
    """Generation of the spec that this condition refers to."""
    last_transition_time: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
    """Time at which `status` last changed."""


class FeedersStatus(Model):
    """State of the feeders."""

    desired: Whole = Field(default=0, ge=0)
    """Pods requested."""
    replicas: Whole = Field(default=0, ge=0)
    """Pods that exist."""
    ready: Whole = Field(default=0, ge=0)
    """Pods whose feeders serve: the feeders that the supervisor reports as ready, counted in whole pods."""
    summary: Metric = "0/0"
    """ready/desired, for `kubectl get`."""


class TrainersStatus(Model):
    """State of the trainers."""

    desired: Whole = Field(default=0, ge=0)
    """Pods requested; for attached trainers, pods that are attached."""
    active: Whole = Field(default=0, ge=0)
    """Pods that run."""
    succeeded: Whole = Field(default=0, ge=0)
    """Pods whose containers exited with code 0."""
    restarts: Whole = Field(default=0, ge=0)
    """Number of times that all trainers were restarted. It is part of the names of the current Job and its pods."""
    failures: Whole = Field(default=0, ge=0)
    """Restarts since the last progress that count against `failurePolicy.maxRestarts`."""
    disruptions: Whole = Field(default=0, ge=0)
    """Restarts since the last progress that do not count against `failurePolicy.maxRestarts`."""
    next_start: Moment = None
    """Earliest time of the next restart."""
    image: Annotated[str, Field(max_length=1024)] = ""
    """The trainers' own image; for attached trainers, the feeders'."""
    sidecar_image: Annotated[str, Field(max_length=1024)] = ""
    """The operator's sidecar image when `image` was first used. It is used with `image` unless the spec names
    another."""
    ranks: Whole = Field(default=0, ge=0)
    """Trainer processes in attached pods that receive batches, as their sidecars report. 0 if the operator creates the
    trainers."""
    followed_uid: Annotated[str, Field(max_length=64)] = ""
    """Uid of the object that `trainers.attach.follow` names; empty until the operator has read it."""
    idle_since: Moment = None
    """Time since which no pod has been attached. Empty while pods are attached, or if the operator creates the
    trainers."""
    summary: Metric = "0/0"
    """Pods that run or exited with code 0, out of those requested; for attached trainers, pods and ranks. For `kubectl
    get`."""


class LoaderStatus(Model):
    """Metrics of the loader over about 10 s, from the supervisor.

    They are written if they change by more than 5%, at most once a minute. With n > 120 jobs in the cluster, they are
    written at most every n/2 s. They are empty while the supervisor does not answer. After the job has ended, they are
    the last metrics written, not those of the whole job. A suspended job has none.
    """

    observed_time: Moment = None
    """Time of the measurement. While an operator is running, the metrics have changed by no more than 5% since then, or
    are empty."""
    batches_per_second: Metric = ""
    """Batches that trainers take per second, summed over all ranks."""
    gb_per_second: Metric = ""
    """Size of the batches that trainers take per second, in units of 10^9 bytes, summed over all ranks."""
    stall_percent: Metric = ""
    """Share of time that trainers spend waiting for a batch."""
    occupancy_percent: Metric = ""
    """Share of the pools that ready and lent batches occupy."""
    verdict: Metric = ""
    """Bottleneck of the input in one word, `ok` if training hardly waits, or `unknown`. If a different number of
    replicas is recommended, that number follows: `feeders 12`."""
    limit: Annotated[str, Field(max_length=32)] = ""
    """Bottleneck of the input: `feeders`, `storage`, `slots`, `network`, `receiver`, `order`, or `trainer` if training
    hardly waits. Empty if unknown."""
    input_bound_percent: Metric = ""
    """Share of each step that training spends waiting for input, over the last minute."""
    recommended_replicas: Whole = Field(default=0, ge=0)
    """Number of feeder pods that would suffice; 0 if unknown. `spec.feeders.autoscaling` determines whether the
    operator acts on it."""
    explanation: Annotated[str, Field(max_length=512)] = ""
    """The verdict in a sentence."""


class RayStatus(Model):
    """Settings in force in the Ray cluster, as reported by its head's GCS."""

    version: Annotated[str, Field(max_length=32)] = ""
    """Ray's version."""
    address: Annotated[str, Field(max_length=320)] = ""
    """Host and port of the GCS of an existing cluster; empty for the job's own."""
    ray_cluster: Annotated[str, Field(max_length=63)] = ""
    """The RayCluster to which the address belongs."""
    worker_register_timeout_seconds: Whole = Field(default=0, ge=0)
    """Ray's worker_register_timeout_seconds, in its raylets and GCS."""
    health_check_period_ms: Whole = Field(default=0, ge=0)
    """Ray's health_check_period_ms, in its GCS."""
    health_check_timeout_ms: Whole = Field(default=0, ge=0)
    """Ray's health_check_timeout_ms, in its GCS."""
    health_check_failure_threshold: Whole = Field(default=0, ge=0)
    """Ray's health_check_failure_threshold, in its GCS."""


class DataLoaderJobStatus(Model):
    """State that the operator last observed."""

    observed_generation: Whole = Field(default=0, ge=0)
    """Generation of the spec that this status refers to."""
    phase: Annotated[Phase, WithJsonSchema({"type": "string"})] = Phase.PENDING  # others may follow
    """Summary of the conditions in one word."""
    reason: Annotated[str, Field(max_length=128)] = ""
    """Reason why the job is not in the state that its spec describes, copied from the condition that gives the details.
    Empty if the job is in that state."""
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
    """Time at which the operator first saw the job, or the job was last resumed."""
    scheduled_time: Moment = None
    """Time at which the last of the needed pods was assigned to a node. The startup deadline counts from this time."""
    serving_time: Moment = None
    """Time at which all parts first served after the start. The startup deadline is met from this time on."""
    completion_time: Moment = None
    """Time at which the job ended."""
    injection: Free | None = None
    """The parts to inject into labeled pods, for the admission policy, which cannot compute them. Absent if the
    operator creates the trainers, and after the job has ended."""

    def condition(self, kind: ConditionType) -> Condition | None:
        """Returns the condition; None if it has not been written yet."""
        return next((condition for condition in self.conditions if condition.type == kind), None)

    def holds(self, kind: ConditionType) -> bool:
        """Returns True if this condition is known to be true."""
        return any(condition.type == kind and condition.status == "True" for condition in self.conditions)
