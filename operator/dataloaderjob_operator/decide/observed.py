"""One job as the operator observed it: its children, its supervisor's report and the troubles of its pods. The module
also formats times and cleans text from other sources. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, auto
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.status import DataLoaderJobStatus, RayStatus
from dataloaderjob.core.measures import Measures
from dataloaderjob.core.supervision import Rates
from dataloaderjob.core.texts import clean
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.followed import Followed
from dataloaderjob_operator.decide.resource_fields import want_of_memory
from dataloaderjob_operator.kinds import Manifest

METRICS_EVERY_S = 60.0
"""Minimum interval between two writes of a status that change only the loader's metrics."""
Key = tuple[str, str]
"""(kind, name) of a child."""
Pod = Mapping[str, Any]
MAX_TROUBLE = 600
MAX_LAST = 500
CRASHES = "ContainerCrashes"
BY_WAITING = {
    "ImagePullBackOff": "ImageNotPulled",
    "ErrImagePull": "ImageNotPulled",
    "ErrImageNeverPull": "ImageNotPulled",
    "InvalidImageName": "ImageNotPulled",
    "RegistryUnavailable": "ImageNotPulled",
    "CreateContainerConfigError": "ConfigMissing",
    "CreateContainerError": "ContainerNotStarted",
    "RunContainerError": "ContainerNotStarted",
    "StartError": "ContainerNotStarted",
    "CrashLoopBackOff": CRASHES,
}
"""Reasons of waiting containers that count as troubles, and their names in a condition."""
DISRUPTIONS = frozenset(
    {
        "Evicted", "Preempting", "Preempted", "NodeShutdown", "Shutdown", "Terminated", "NodeLost",
        "TerminationByKubelet", "NodeAffinity", "UnexpectedAdmissionError", "TopologyAffinityError",
    }
)  # fmt: skip
"""Reasons of pods that their node ended or did not admit, in addition to those that begin with OutOf, like OutOfcpu."""
_OWN_LIMIT = re.compile(r"\bexceed(s|ed) (the|its)\b.*\b(limit|local ephemeral storage)")
"""The kubelet's message for an eviction that is the pod's own fault: a volume or its disk exceeds its limit."""
_NEVER = datetime.max.replace(tzinfo=UTC)
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
KILLED_S = 60.0
"""Seconds for which an out-of-memory kill of a container is reported."""
CAUSED_S = 60.0
"""Seconds within which a container fails if the end of another container has brought it down."""


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
    """Empty if the trouble concerns the whole pod."""
    reason: str
    """CamelCase, for a condition."""
    message: str
    kind: str = "pod"
    """The kind of the object named by `pod`; a Job whose pods are refused has no pod."""
    ended_at: datetime | None = None
    """The time at which the pod or container ended for good; None: it may still start."""
    is_root: bool = False
    """True if no other pod caused it: the node or the cluster ended the pod or container."""
    is_disruption: bool = False
    """True if the cluster ended the pod for its own reasons, or the pod's node is lost; the pod's content is not at
    fault."""

    def __str__(self) -> str:
        where = f"{self.kind} {self.pod}" + (f", container {self.container}" if self.container else "")
        return f"{where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause that prevents feeders, or trainers that depend on them, from working."""

    reason: str
    """CamelCase, for a condition."""
    text: str
    host: str = ""
    """Address of the pod that has the cause; empty if no pod has it or the pod is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorStatus:
    """The last report of a supervisor. Two reports are equal if they have the same effect on the job; rates do not
    count."""

    silent: str = ""
    """The reason why several consecutive polls got no answer; empty while the supervisor answers."""
    hung: bool = False
    """True if the supervisor has been silent for minutes although its pod is ready and it answered before."""
    desired: int = 0
    """The number of feeder processes that the supervisor keeps."""
    ready: int = 0
    """Feeder processes that serve."""
    cause: Cause | None = None
    """The worst cause of the first feeder that does not serve."""
    failure: Cause | None = None
    """The error that a trainer received instead of a batch, if no trainer has taken a batch since."""
    ray: RayStatus = field(default_factory=RayStatus)
    """The version is missing while Ray has not answered the supervisor."""
    sidecars: int = 0
    """Sidecars that are connected to the supervisor."""
    ranks: int = 0
    """Trainer processes that these sidecars serve."""
    rates: Rates | None = field(default=None, compare=False)
    measures: Measures | None = field(default=None, compare=False)
    """The measures of the last minute; None while there are too few batches."""


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """The state of a job's autoscaling, as the autoscaler reports it."""

    is_active: bool
    reason: str
    """CamelCase, for a condition."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A job as one reconcile observes it, with all of its children and pods."""

    job: DataLoaderJob
    status: DataLoaderJobStatus = field(default_factory=DataLoaderJobStatus)
    """The last status written."""
    children: Mapping[Key, Manifest] = field(default_factory=dict)
    """Live objects that the job owns, except pods."""
    pods: tuple[Manifest, ...] = ()
    attached: tuple[Manifest, ...] = ()
    """Pods of other controllers with the label `names.LABEL_INJECT`, including those that have ended; empty unless the
    job attaches trainers."""
    followed: Followed | None = None
    """The last read of the object that the job follows; None: it follows none, or has not read it yet."""
    doubts: tuple[str, ...] = ()
    """Fields of the templates that seem to be misspelt."""
    refused: str = ""
    """The API server's message when it last refused a child; empty if it accepted all of them."""
    not_understood: str = ""
    """The error that prevents the operator from building a child."""
    refused_texts: frozenset[str] = frozenset()
    """Messages that made the API server refuse a status."""
    supervisor: SupervisorStatus | None = None
    """The supervisor's last report, which may be of its silence; None while it has not been polled."""
    scaling: ScalingReport | None = None
    """The autoscaler's last report; None while it has not looked at the job."""
    written_at: datetime | None = None
    """The time at which this operator last wrote the status."""
    metrics_at: datetime | None = None
    """The time at which this operator last wrote the loader's metrics."""
    event_troubles: Mapping[str, Trouble] = field(default_factory=dict)
    """Troubles that events reported about objects that hold up the job, by uid."""

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
        """Returns the number of pods whose feeders serve, by the supervisor's report. While the supervisor is silent,
        the number cannot rise."""
        if self.supervisor is not None and not self.supervisor.silent:
            return self.supervisor.ready // self.job.spec.feeders.processes_per_pod
        feeders = self.children.get(("Deployment", names.feeders(self.job.name)), {})
        return min(self.status.feeders.ready, int(feeders.get("status", {}).get("readyReplicas") or 0))

    def waits_for_feeders(self, attempt: int) -> bool:
        """Checks whether the trainers of this attempt are held back because too few feeders serve, so that no GPU waits
        for feeders. Existing trainers are kept, whatever happens to feeders."""
        there = ("Job", names.trainers(self.job.name, attempt)) in self.children
        return not there and self.serving() < self.job.spec.feeders.min_available

    def describe(self, cause: Cause) -> str:
        """Prefixes a cause with the name of its pod."""
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


def first_exit_codes(pods: Iterable[Pod]) -> frozenset[int]:
    """Returns the exit codes of the containers that failed first; the containers that they brought down ended later."""
    ends = [
        (_end_of(ended) or _LONG_AGO, int(ended["exitCode"]))
        for pod in pods
        for status in pod.get("status", {}).get("containerStatuses") or ()
        if (ended := status.get("state", {}).get("terminated") or {}).get("exitCode", 0)
    ]
    first = min((at for at, _ in ends), default=_LONG_AGO)
    return frozenset(code for at, code in ends if at == first)


def parse_time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def show_time(moment: datetime) -> str:
    """Formats a time as Kubernetes does, in whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def first_trouble(found: Iterable[Trouble | None]) -> Trouble | None:
    """Chooses the trouble to report: pods that the node or cluster ended come before pods that failed on their own,
    then the earliest in time, then the first pod by name. This order keeps the text stable."""

    def order(trouble: Trouble) -> tuple[bool, datetime, str]:
        return not trouble.is_root, trouble.ended_at or _NEVER, trouble.pod

    return min((trouble for trouble in found if trouble), key=order, default=None)


def killed_of_late(pod: Pod, now: datetime) -> Trouble | None:
    """Returns the out-of-memory kill of a container within the last KILLED_S, even if the container is ready again.

    On cgroup v2 the kubelet ends the whole container, which then serves until the next kill.
    """
    for status in _containers(pod):
        ended = status.get("lastState", {}).get("terminated")
        killed_at = _end_of(ended)
        if ended and _oom(ended) and killed_at and (now - killed_at).total_seconds() < KILLED_S:
            return _trouble(
                pod, status["name"], "OutOfMemory", _crash(pod, status, ended), killed_at, is_root=True
            )
    return None


def trouble_of(pod: Pod) -> Trouble | None:
    """Diagnoses a pod. Returns None if nothing is wrong or the pod is merely starting."""
    return next((found for check in _CHECKS for found in check(pod)), None)


def _trouble(
    pod: Pod, container: str, reason: str, message: str, ended_at: datetime | None = None, *,
    is_root: bool = False, is_disruption: bool = False,
) -> Trouble:  # fmt: skip
    name, text = str(pod["metadata"]["name"]), clean(message, MAX_TROUBLE)
    return Trouble(
        name, container, reason, text, ended_at=ended_at, is_root=is_root, is_disruption=is_disruption
    )


def _unscheduled(pod: Pod) -> Iterator[Trouble]:
    for condition in pod.get("status", {}).get("conditions", ()):
        if (condition["type"], condition["status"]) == ("PodScheduled", "False"):
            gated = condition.get("reason") == "SchedulingGated"
            reason = "SchedulingGated" if gated else "Unschedulable"
            yield _trouble(pod, "", reason, condition.get("message", "no node fits"))


def _evicted(pod: Pod) -> Iterator[Trouble]:
    status = pod.get("status", {})
    if status.get("phase") == "Failed" and status.get("reason"):
        reason, text = str(status["reason"]), status.get("message", "ended by its node")
        own = reason not in DISRUPTIONS and not reason.startswith("OutOf")
        own = own or _OWN_LIMIT.search(text) is not None
        at = _disrupted_at(pod) or _first_end(pod)
        yield _trouble(pod, "", reason, text, at, is_root=True, is_disruption=not own)


def _disrupted(pod: Pod) -> Iterator[Trouble]:
    """Kubernetes sets this condition on a pod that it ends, before the containers end."""
    condition = condition_of(pod, "DisruptionTarget") or {}
    if condition.get("status") == "True":
        text = condition.get("message") or "ended by the cluster"
        reason, at = condition.get("reason") or "Disrupted", _disrupted_at(pod)
        yield _trouble(pod, "", reason, text, at, is_root=True, is_disruption=True)


def _on_lost_node(pod: Pod) -> Iterator[Trouble]:
    since = node_silent_since(pod)
    if since is not None:
        text = f"its node {node_of(pod)} does not answer"
        yield _trouble(pod, "", "NodeUnreachable", text, since, is_root=True, is_disruption=True)


def node_of(pod: Pod) -> str:
    return str(pod.get("spec", {}).get("nodeName") or "")


def node_silent_since(pod: Pod) -> datetime | None:
    """Returns the time at which the cluster gave up the pod's node; None if it has not.

    Kubernetes then marks the pod as not ready, and leaves the rest of the status as the kubelet last reported it:
    containers that are ready, and no reason.
    """
    status, ready = pod.get("status", {}), condition_of(pod, "Ready") or {}
    silent = (
        ready.get("status") == "False" and not ready.get("reason") and has_condition(pod, "ContainersReady")
    )
    if status.get("phase") not in {"Running", "Unknown"} or not (
        silent or status.get("reason") == "NodeLost"
    ):
        return None
    since = ready.get("lastTransitionTime")
    return parse_time(since) if since else _LONG_AGO


def _disrupted_at(pod: Pod) -> datetime | None:
    since = (condition_of(pod, "DisruptionTarget") or {}).get("lastTransitionTime")
    return parse_time(since) if since else None


def _first_end(pod: Pod) -> datetime | None:
    ends = [_end_of(status.get("state", {}).get("terminated")) for status in _containers(pod)]
    return min((end for end in ends if end), default=None)


def _end_of(terminated: Mapping[str, Any] | None) -> datetime | None:
    finished = (terminated or {}).get("finishedAt")
    return parse_time(finished) if finished else None


def _waiting(pod: Pod) -> Iterator[Trouble]:
    for status in _containers(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in BY_WAITING:
            text = waiting.get("message") or reason
            ended = status.get("lastState", {}).get("terminated")
            if reason == "CrashLoopBackOff" and ended:
                text = _crash(pod, status, ended)
            elif reason != text and not text.startswith(reason):
                text = f"{reason}: {text}"
            yield _trouble(pod, status["name"], "OutOfMemory" if _oom(ended) else BY_WAITING[reason], text)


def _ended(pod: Pod) -> Iterator[Trouble]:
    failed = []
    for status in _containers(pod):
        ended = status.get("state", {}).get("terminated") or {}
        if ended.get("exitCode", 0):
            again = _starts_again(pod, status)
            reason = "OutOfMemory" if _oom(ended) else CRASHES if again else "ContainerFailed"
            at = None if again else _end_of(ended)
            text = _crash(pod, status, ended) if again else _exit(pod, status, ended)
            failed.append(_trouble(pod, status["name"], reason, text, at, is_root=_oom(ended)))
    for first in failed:
        yield from _brought_down(pod, first.ended_at)
    yield from sorted(failed, key=lambda found: (not found.is_root, found.ended_at or _NEVER))


def _brought_down(pod: Pod, at: datetime | None) -> Iterator[Trouble]:
    """Yields a container that ran out of memory and runs again, if its end made another container fail."""
    for status in _containers(pod):
        ended = status.get("lastState", {}).get("terminated")
        killed_at = _end_of(ended)
        if ended and _oom(ended) and at and killed_at and -1 <= (at - killed_at).total_seconds() <= CAUSED_S:
            yield _trouble(
                pod, status["name"], "OutOfMemory", _crash(pod, status, ended), killed_at, is_root=True
            )


def _tries_again(pod: Pod) -> Iterator[Trouble]:
    """Yields a container that runs between two crashes: the trouble persists until the container is ready."""
    for status in _containers(pod):
        ended = status.get("lastState", {}).get("terminated") or {}
        if "running" in status.get("state", {}) and not status.get("ready") and ended.get("exitCode", 0):
            yield _trouble(
                pod, status["name"], "OutOfMemory" if _oom(ended) else CRASHES, _crash(pod, status, ended)
            )


_CHECKS: tuple[Callable[[Pod], Iterator[Trouble]], ...] = (
    _unscheduled, _evicted, _disrupted, _on_lost_node, _waiting, _ended, _tries_again,
)  # fmt: skip
"""Checks in order: the first that applies is the cause; later ones are its consequences."""


def _starts_again(pod: Pod, status: Mapping[str, Any]) -> bool:
    """Checks whether the node restarts an ended container; it restarts a native sidecar even if the pod has `Never`."""
    spec = pod.get("spec", {})
    own = (c.get("restartPolicy") for c in spec.get("initContainers") or () if c["name"] == status["name"])
    return bool((next(own, None) or spec.get("restartPolicy")) != "Never")


def _containers(pod: Pod) -> Iterator[Mapping[str, Any]]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _oom(ended: Mapping[str, Any] | None) -> bool:
    return ended is not None and ended.get("reason") == "OOMKilled"


def _crash(pod: Pod, status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    """Describes a crash in text that stays the same from the container's end until the container is ready again."""
    count = int(status.get("restartCount") or 0)
    return _exit(pod, status, ended) + (f", {count} restart{'' if count == 1 else 's'}" if count else "")


def _exit(pod: Pod, status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    """Describes how a container ended, with its termination message."""
    how = (
        f"killed by signal {ended['signal']}" if ended.get("signal") else f"exit code {ended.get('exitCode')}"
    )
    if _oom(ended):
        how = want_of_memory(pod, str(status.get("name")))
    text = " ".join(str(ended.get("message") or "").split())
    return f"{how}: {_last(text)}" if text else how


def _last(words: str) -> str:
    """Returns the end of a container's last lines, which contains the error of a traceback."""
    return words if len(words) <= MAX_LAST else f"…{words[-MAX_LAST:]}"
