"""What keeps a pod from doing its work, read from its status: pod, container and cause, in words. Pure.

A status has it in five places; the first that applies, in the order of `_CHECKS`, is the cause, later ones its
consequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Pod = Mapping[str, Any]
MAX_MESSAGE = 600
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
"""Reasons for which a container waits and that are troubles, and what they are called in a condition."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A cause for which one pod does not do its work."""

    pod: str
    container: str
    """Empty where the whole pod has it."""
    reason: str
    """CamelCase, for a condition."""
    message: str
    kind: str = "pod"
    """The kind of the object that `pod` names: a Job whose pods are refused has none."""

    def __str__(self) -> str:
        where = f"{self.kind} {self.pod}" + (f", container {self.container}" if self.container else "")
        return f"{where}: {self.message}"


def first(found: Iterable[Trouble | None]) -> Trouble | None:
    """The trouble to report: that of the pod whose name comes first, so that the text stays the same."""
    return min((trouble for trouble in found if trouble), key=lambda trouble: trouble.pod, default=None)


def of(pod: Pod) -> Trouble | None:
    """Diagnoses a pod; None while nothing is wrong, also while it merely starts."""
    for check in _CHECKS:
        for container, reason, message in check(pod):
            return Trouble(str(pod["metadata"]["name"]), container, reason, short(message))
    return None


_Found = Iterator[tuple[str, str, str]]


def _unscheduled(pod: Pod) -> _Found:
    for condition in pod.get("status", {}).get("conditions", ()):
        if (condition["type"], condition["status"]) == ("PodScheduled", "False"):
            gated = condition.get("reason") == "SchedulingGated"
            yield (
                "",
                "SchedulingGated" if gated else "Unschedulable",
                condition.get("message", "no node fits"),
            )


def _evicted(pod: Pod) -> _Found:
    status = pod.get("status", {})
    if status.get("phase") == "Failed" and status.get("reason"):
        yield "", status["reason"], status.get("message", "ended by its node")


def _waiting(pod: Pod) -> _Found:
    for status in _containers(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in BY_WAITING:
            text = waiting.get("message") or reason
            ended = status.get("lastState", {}).get("terminated")
            if reason == "CrashLoopBackOff" and ended:
                text = _crash(status, ended)
            elif reason != text and not text.startswith(reason):
                text = f"{reason}: {text}"
            yield status["name"], "OutOfMemory" if _oom(ended) else BY_WAITING[reason], text


def _ended(pod: Pod) -> _Found:
    for status in _containers(pod):
        ended = status.get("state", {}).get("terminated") or {}
        if ended.get("exitCode", 0):
            again = _starts_again(pod, status)
            text = _crash(status, ended) if again else _exit(ended)
            yield (
                status["name"],
                "OutOfMemory" if _oom(ended) else CRASHES if again else "ContainerFailed",
                text,
            )


def _tries_again(pod: Pod) -> _Found:
    """A container runs for a while between two crashes: it is the same trouble until it is ready."""
    for status in _containers(pod):
        ended = status.get("lastState", {}).get("terminated") or {}
        if "running" in status.get("state", {}) and not status.get("ready") and ended.get("exitCode", 0):
            yield status["name"], "OutOfMemory" if _oom(ended) else CRASHES, _crash(status, ended)


_CHECKS: tuple[Callable[[Pod], _Found], ...] = (_unscheduled, _evicted, _waiting, _ended, _tries_again)


def _starts_again(pod: Pod, status: Mapping[str, Any]) -> bool:
    """Checks whether its node starts an ended container anew: a native sidecar's also in a pod with `Never`."""
    spec = pod.get("spec", {})
    own = (c.get("restartPolicy") for c in spec.get("initContainers") or () if c["name"] == status["name"])
    return bool((next(own, None) or spec.get("restartPolicy")) != "Never")


def _containers(pod: Pod) -> Iterator[Mapping[str, Any]]:
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _oom(ended: Mapping[str, Any] | None) -> bool:
    return ended is not None and ended.get("reason") == "OOMKilled"


def _crash(status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    """The same words from a container's end until it is ready again."""
    count = int(status.get("restartCount") or 0)
    return _exit(ended) + (f", {count} restart{'' if count == 1 else 's'}" if count else "")


def _exit(ended: Mapping[str, Any]) -> str:
    """Describes how a container ended, with the last words that it left for its node."""
    how = (
        f"killed by signal {ended['signal']}" if ended.get("signal") else f"exit code {ended.get('exitCode')}"
    )
    if _oom(ended):
        how = "killed for want of memory: raise its memory limit"
    text = " ".join(str(ended.get("message") or "").split())
    return f"{how}: {_last(text)}" if text else how


def _last(words: str) -> str:
    """The end of a container's last lines: where a traceback has its error."""
    return words if len(words) <= MAX_LAST else f"…{words[-MAX_LAST:]}"


def short(message: str) -> str:
    """Puts a message into one line that is not longer than MAX_MESSAGE."""
    text = " ".join(str(message).split())
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}…"
