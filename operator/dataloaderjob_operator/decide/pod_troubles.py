"""The problem with one pod, found in its status: the pod has no node, the cluster ended the pod, or a container waits
or failed. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from dataloaderjob.core.texts import clean
from dataloaderjob_operator.decide.observed import Pod, Trouble, condition_of, has_condition, parse_time
from dataloaderjob_operator.decide.resource_fields import want_of_memory

MAX_TROUBLE = 600
MAX_LAST = 500
CRASHES = "ContainerCrashes"
NODE_UNREACHABLE = "NodeUnreachable"
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
"""Reasons of waiting containers that count as problems, each with its condition reason."""
DISRUPTIONS = frozenset(
    {
        "Evicted", "Preempting", "Preempted", "NodeShutdown", "Shutdown", "Terminated", "NodeLost",
        "TerminationByKubelet", "NodeAffinity", "UnexpectedAdmissionError", "TopologyAffinityError",
    }
)  # fmt: skip
"""Reasons in the status of a pod that its node ended or did not admit. Reasons that begin with OutOf, such as OutOfcpu,
also count."""
_OWN_LIMIT = re.compile(r"\bexceed(s|ed) (the|its)\b.*\b(limit|local ephemeral storage)")
"""The kubelet's message for an eviction that is the pod's own fault: the pod exceeds a limit on its volumes or its
local storage."""
_NEVER = datetime.max.replace(tzinfo=UTC)
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
KILLED_S = 60.0
"""Seconds for which an out-of-memory kill of a container is reported."""
CAUSED_S = 60.0
"""Seconds after a container's end within which another container's failure counts as a consequence."""


def first_exit_codes(pods: Iterable[Pod]) -> frozenset[int]:
    """Returns the exit codes of the containers that failed first. Later failures may be consequences."""
    ends = [
        (_end_of(ended) or _LONG_AGO, int(ended["exitCode"]))
        for pod in pods
        for status in pod.get("status", {}).get("containerStatuses") or ()
        if (ended := status.get("state", {}).get("terminated") or {}).get("exitCode", 0)
    ]
    first = min((at for at, _ in ends), default=_LONG_AGO)
    return frozenset(code for at, code in ends if at == first)


def first_trouble(found: Iterable[Trouble | None]) -> Trouble | None:
    """Chooses the problem to report. A problem caused by the node or the cluster takes precedence over a pod's own
    failure. Among equals, the earliest problem takes precedence, and then the first by pod name. This order keeps the
    text stable."""

    def order(trouble: Trouble) -> tuple[bool, datetime, str]:
        return not trouble.is_root, trouble.ended_at or _NEVER, trouble.pod

    return min((trouble for trouble in found if trouble), key=order, default=None)


def killed_of_late(pod: Pod, now: datetime) -> Trouble | None:
    """Returns a container's out-of-memory kill within the last KILLED_S seconds, even if the container is ready again.

    On cgroup v2, an out-of-memory kill ends the whole container, which then restarts and serves until the next kill.
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
        reason, text = str(status["reason"]), status.get("message", "terminated by its node")
        own = reason not in DISRUPTIONS and not reason.startswith("OutOf")
        own = own or _OWN_LIMIT.search(text) is not None
        at = _disrupted_at(pod) or _first_end(pod)
        yield _trouble(pod, "", reason, text, at, is_root=True, is_disruption=not own)


def _disrupted(pod: Pod) -> Iterator[Trouble]:
    """Yields the disruption of a pod that Kubernetes is ending. Kubernetes sets a condition for it before the
    containers end."""
    condition = condition_of(pod, "DisruptionTarget") or {}
    if condition.get("status") == "True":
        text = condition.get("message") or "terminated by the cluster"
        reason, at = condition.get("reason") or "Disrupted", _disrupted_at(pod)
        yield _trouble(pod, "", reason, text, at, is_root=True, is_disruption=True)


def lost_node(pod: Pod) -> Trouble | None:
    """Returns the problem if the pod's node does not answer; None if it does."""
    return next(_on_lost_node(pod), None)


def _on_lost_node(pod: Pod) -> Iterator[Trouble]:
    since = node_silent_since(pod)
    if since is not None:
        text = f"its node {node_of(pod)} does not respond"
        yield _trouble(pod, "", NODE_UNREACHABLE, text, since, is_root=True, is_disruption=True)


def node_of(pod: Pod) -> str:
    return str(pod.get("spec", {}).get("nodeName") or "")


def node_silent_since(pod: Pod) -> datetime | None:
    """Returns the time at which the cluster declared the pod's node lost; None if it has not.

    Kubernetes then marks the pod as not ready, but leaves the rest of its status as last reported: the containers are
    ready, and no reason is given.
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
    """Yields the out-of-memory kill of a container that runs again, if the kill made another container fail."""
    for status in _containers(pod):
        ended = status.get("lastState", {}).get("terminated")
        killed_at = _end_of(ended)
        if ended and _oom(ended) and at and killed_at and -1 <= (at - killed_at).total_seconds() <= CAUSED_S:
            yield _trouble(
                pod, status["name"], "OutOfMemory", _crash(pod, status, ended), killed_at, is_root=True
            )


def _tries_again(pod: Pod) -> Iterator[Trouble]:
    """Yields the problem of a container that crashed and runs again, until the container is ready."""
    for status in _containers(pod):
        ended = status.get("lastState", {}).get("terminated") or {}
        if "running" in status.get("state", {}) and not status.get("ready") and ended.get("exitCode", 0):
            yield _trouble(
                pod, status["name"], "OutOfMemory" if _oom(ended) else CRASHES, _crash(pod, status, ended)
            )


_CHECKS: tuple[Callable[[Pod], Iterator[Trouble]], ...] = (
    _unscheduled, _evicted, _disrupted, _on_lost_node, _waiting, _ended, _tries_again,
)  # fmt: skip
"""The checks, in order. The first check that applies finds the cause; later checks would find its consequences."""


def _starts_again(pod: Pod, status: Mapping[str, Any]) -> bool:
    """Returns True if the node restarts this ended container. The node restarts a native sidecar even if the pod's
    restart policy is `Never`."""
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
    """Describes a crash. The text stays the same until the container is ready again."""
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
    """Returns the end of a container's output, where a traceback has its error."""
    return words if len(words) <= MAX_LAST else f"…{words[-MAX_LAST:]}"
