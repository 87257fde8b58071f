"""One job as the operator observed it: its children, its supervisor's report and the problems of its pods. This module
also reads the common fields of objects, and formats times. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.status import DataLoaderJobStatus, RayStatus
from dataloaderjob.core.measures import Measures
from dataloaderjob.core.supervision import Rates
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.followed import Followed
from dataloaderjob_operator.decide.ray_clusters import RayCluster
from dataloaderjob_operator.kinds import Manifest

METRICS_EVERY_S = 60.0
"""Minimum interval in seconds between two writes of a status that change only the loader's metrics."""
Key = tuple[str, str]
"""(kind, name) of a child."""
Pod = Mapping[str, Any]


class Trainers(Enum):
    """Phases of the current attempt's Indexed Job."""

    ABSENT = auto()
    LEAVING = auto()
    """The Job is being deleted; its name is free again once the Job is gone."""
    ACTIVE = auto()
    COMPLETE = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True)
class Trouble:
    """The cause that prevents one pod from doing its work."""

    pod: str
    container: str
    """Name of the container; empty if the problem concerns the whole pod."""
    reason: str
    """The reason in CamelCase, as conditions require."""
    message: str
    kind: str = "pod"
    """The kind of the object that `pod` names. If the pods of a Job are refused, this object is the Job itself."""
    ended_at: datetime | None = None
    """The time at which the pod or container ended for good; None if it may still start."""
    is_root: bool = False
    """True if no other pod caused the problem: the node or the cluster ended this pod or container."""
    is_disruption: bool = False
    """True if the pod's own containers are not at fault: the cluster ended the pod, or the pod's node is lost."""

    def __str__(self) -> str:
        where = f"{self.kind} {self.pod}" + (f", container {self.container}" if self.container else "")
        return f"{where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause that prevents feeders from working, or the trainers that depend on them."""

    reason: str
    """The reason in CamelCase, as conditions require."""
    text: str
    host: str = ""
    """Address of the pod that has the cause; empty if it is unknown, or if no pod has the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorStatus:
    """The last report of a supervisor. Two reports are equal if they have the same effect on the job: the comparison
    ignores measures and rates."""

    silent: str = ""
    """The reason why the last polls got no answer; empty while the supervisor answers."""
    hung: bool = False
    """True if the supervisor has been silent for minutes although its pod is ready and it answered before."""
    desired: int = 0
    """The number of feeder processes that the supervisor keeps."""
    ready: int = 0
    """Number of feeder processes that serve."""
    ended: bool = False
    """True if all feeders have ended because the operator asked for it."""
    cause: Cause | None = None
    """The cause reported for the feeder that `core.supervision.worst` chooses; None if there is none."""
    failure: Cause | None = None
    """The error that a trainer received instead of a batch. None if there was none, or if a trainer has taken a batch
    since."""
    ray: RayStatus = field(default_factory=RayStatus)
    """The status of Ray. Its version is missing until Ray has answered the supervisor for the first time."""
    sidecars: int = 0
    """Number of sidecars that are connected to the supervisor."""
    ranks: int = 0
    """Number of trainer processes that these sidecars serve."""
    rates: Rates | None = field(default=None, compare=False)
    measures: Measures | None = field(default=None, compare=False)
    """The measures of the last minute; None while there are too few batches."""


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """The state of a job's autoscaling, as the autoscaler reports it."""

    is_active: bool
    reason: str
    """The reason in CamelCase, as conditions require."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job with all its children and pods, as one reconcile observes it."""

    job: DataLoaderJob
    status: DataLoaderJobStatus = field(default_factory=DataLoaderJobStatus)
    """The last status that was written."""
    children: Mapping[Key, Manifest] = field(default_factory=dict)
    """Live objects that the job owns, except its pods."""
    pods: tuple[Manifest, ...] = ()
    attached: tuple[Manifest, ...] = ()
    """Pods of other controllers with the label `names.LABEL_INJECT`, including those that have ended; empty unless the
    job attaches trainers."""
    followed: Followed | None = None
    """The last read of the followed object. None if the job follows no object, or the object has not been read yet."""
    ray_cluster: RayCluster | None = None
    """The last lookup of the RayCluster that the job needs. None if it needs none, or if there has been no lookup."""
    doubts: tuple[str, ...] = ()
    """Template fields that seem to be misspelled."""
    refused: str = ""
    """The API server's message when it last refused a child; empty if it accepted all of them."""
    not_understood: str = ""
    """The error that prevents the operator from building a child."""
    refused_texts: frozenset[str] = frozenset()
    """Condition messages that made the API server refuse a status."""
    supervisor: SupervisorStatus | None = None
    """The supervisor's last report, which may say that it is silent. None while the supervisor has not been polled."""
    scaling: ScalingReport | None = None
    """The autoscaler's last report; None while it has not evaluated the job."""
    written_at: datetime | None = None
    """The time at which this operator last wrote the status."""
    metrics_at: datetime | None = None
    """The time at which this operator last wrote the loader's metrics."""
    event_troubles: Mapping[str, Trouble] = field(default_factory=dict)
    """Problems that events reported about objects that hold up the job, keyed by uid."""

    @property
    def attempt(self) -> int:
        return self.status.trainers.restarts

    @property
    def generation(self) -> int:
        return self.job.metadata.generation or 0

    def of_role(self, role: names.Role) -> list[Pod]:
        """Returns the pods of a role, including those being deleted."""
        return [pod for pod in self.pods if role_of(pod) == role]

    def serving(self) -> int:
        """Returns the number of pods whose feeders serve, according to the supervisor. While the supervisor is silent,
        the number cannot rise."""
        if self.supervisor is not None and not self.supervisor.silent:
            return self.supervisor.ready // self.job.spec.feeders.processes_per_pod
        if self.job.spec.ray.external is not None:
            return self.status.feeders.ready
        feeders = self.children.get(("Deployment", names.feeders(self.job.name)), {})
        return min(self.status.feeders.ready, int(feeders.get("status", {}).get("readyReplicas") or 0))

    def waits_for_feeders(self, attempt: int) -> bool:
        """Returns True if the trainers of this attempt are held back because too few feeders serve. Otherwise, GPUs
        would wait for feeders. Existing trainers are kept in any case."""
        there = ("Job", names.trainers(self.job.name, attempt)) in self.children
        return not there and self.serving() < self.job.spec.feeders.min_available

    def describe(self, cause: Cause) -> str:
        """Prefixes a cause with the name of its pod, if that is known."""
        pods = (p["metadata"]["name"] for p in self.pods if p.get("status", {}).get("podIP") == cause.host)
        pod = next(pods, None) if cause.host else None
        return f"pod {pod}: {cause.text}" if pod else cause.text

    def trainers(self) -> Trainers:
        found = self.children.get(("Job", names.trainers(self.job.name, self.attempt)))
        if found is None:
            return Trainers.ABSENT
        if leaving(found):
            return Trainers.LEAVING
        if has_condition(found, "Complete") or has_condition(found, "SuccessCriteriaMet"):
            return Trainers.COMPLETE
        if has_condition(found, "Failed") or has_condition(found, "FailureTarget"):
            return Trainers.FAILED
        return Trainers.ACTIVE


def key_of(child: Manifest) -> Key:
    return child["kind"], child["metadata"]["name"]


def role_of(thing: Mapping[str, Any]) -> str | None:
    return (thing["metadata"].get("labels") or {}).get(names.LABEL_ROLE)


def leaving(thing: Mapping[str, Any]) -> bool:
    return thing["metadata"].get("deletionTimestamp") is not None


def has_condition(thing: Mapping[str, Any], kind: str) -> bool:
    return (condition_of(thing, kind) or {}).get("status") == "True"


def condition_of(thing: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    conditions = thing.get("status", {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind), None)


def parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def show_time(moment: datetime) -> str:
    """Formats a time as Kubernetes does, in whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
