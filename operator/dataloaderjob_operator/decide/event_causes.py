"""Causes that only events tell: volumes that cannot be mounted, pods that a quota or a policy refuses. Pure.

Which objects are worth a look (`asking`), what their events mean (`meaning`), and what was heard of a role (`told`).
Nobody watches all events of a cluster for it: a few objects of a job are asked about, and only while it does not serve
and no status says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dataloaderjob_operator import names
from dataloaderjob_operator.decide import troubles
from dataloaderjob_operator.decide.observed import Observed, has_condition, leaving, parse_time
from dataloaderjob_operator.decide.troubles import Trouble

SETTLE_S = 5.0
"""Something that begins has so long before it is asked about."""
AGAIN_S = 10.0
"""Between two looks at the same job's events."""
PODS = 2
"""Of a role at a time: what holds one up holds up the others."""
REASONS = {
    "FailedMount": "VolumeNotMounted",
    "FailedMapVolume": "VolumeNotMounted",
    "FailedAttachVolume": "VolumeNotAttached",
    "FailedCreatePodSandBox": "SandboxNotCreated",
    "FailedPodSandBoxStatus": "SandboxNotCreated",
    "NetworkNotReady": "SandboxNotCreated",
    "FailedCreate": "PodsRefused",
}
"""What the reason of an event is called in a condition; another's own is taken as it is."""
MOVED_ON = frozenset({"Pulling", "Pulled", "Created", "Started", "SuccessfulCreate"})
"""A pod or Job of which this was told later has left its earlier trouble behind."""
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
_NOISE = (
    (re.compile(r"\b[0-9a-f]{32,}\b"), "…"),
    (re.compile(r'^Error creating: pods "[^"]*" is '), "a pod is "),
)
"""Ids that differ from one try to the next: the text of a condition shall not."""


@dataclass(frozen=True, slots=True)
class Question:
    """An object whose events may tell something."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Asking:
    """What to ask now, and when to think about it again."""

    questions: tuple[Question, ...] = ()
    again_s: float | None = None
    """None: nothing is held up."""


def asking(observed: Observed, roles: Iterable[names.Role], now: datetime) -> Asking:
    """About the parts of a job that do not serve."""
    questions, waits = [], []
    for role in roles:
        if troubles.first(observed.of_role(role)) is not None:
            continue
        chosen = 0
        for thing, since in _held_up(observed, role):
            age = (now - since).total_seconds()
            if age < SETTLE_S:
                waits.append(SETTLE_S - age)
            elif thing.kind == "Job" or chosen < PODS:
                chosen += thing.kind == "Pod"
                questions.append(thing)
                waits.append(AGAIN_S)
    return Asking(tuple(questions), min(waits, default=None))


def told(observed: Observed, *roles: names.Role) -> Trouble | None:
    """What events said of the first of these roles' objects that is still held up."""
    for role in roles:
        for thing, _ in _held_up(observed, role):
            if (trouble := observed.heard.get(thing.uid)) is not None:
                return trouble
    return None


def meaning(question: Question, events: Iterable[Mapping[str, Any]]) -> Trouble | None:
    """The newest warning, unless the object has moved on since."""
    found = sorted(events, key=_moment)
    warnings = [event for event in found if event.get("type") == "Warning"]
    if not warnings:
        return None
    newest = warnings[-1]
    if any(e.get("reason") in MOVED_ON and _moment(e) > _moment(newest) for e in found):
        return None
    reason = str(newest.get("reason") or "")
    known = REASONS.get(reason) or (reason if re.fullmatch("[A-Z][A-Za-z0-9]{1,63}", reason) else "Warning")
    text = str(newest.get("message") or reason)
    for pattern, instead in _NOISE:
        text = pattern.sub(instead, text)
    return Trouble(question.name, "", known, troubles.short(text), kind=question.kind.replace("Pod", "pod"))


def _held_up(observed: Observed, role: names.Role) -> Iterator[tuple[Question, datetime]]:
    """Objects that wait for something that their own status does not tell, by name, and since when."""
    for pod in sorted(observed.of_role(role), key=lambda pod: str(pod["metadata"]["name"])):
        if (since := _waits_on_node(pod)) is not None and troubles.of(pod) is None:
            yield Question("Pod", pod["metadata"]["name"], pod["metadata"].get("uid", "")), since
    if role is names.Role.TRAINER:
        job = observed.children.get(("Job", names.trainers(observed.job.name, observed.attempt)))
        if job is not None and _short_of_pods(job):
            yield Question("Job", job["metadata"]["name"], job["metadata"].get("uid", "")), _made(job)


def _waits_on_node(pod: Mapping[str, Any]) -> datetime | None:
    """Since when a pod has a node and not one container; None if that is not so."""
    status = pod.get("status", {})
    placed = next((c for c in status.get("conditions") or () if c["type"] == "PodScheduled"), None)
    if status.get("phase", "Pending") != "Pending" or placed is None or placed.get("status") != "True":
        return None
    for group in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(group) or ():
            if {"running", "terminated"} & set(container.get("state") or {}):
                return None
    since = placed.get("lastTransitionTime")
    return parse_time(since) if since else _made(pod)


def _short_of_pods(job: Mapping[str, Any]) -> bool:
    """Whether an Indexed Job that shall run has fewer pods than it asks for."""
    if leaving(job) or any(
        has_condition(job, kind) for kind in ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
    ):
        return False
    spec, status = job.get("spec", {}), job.get("status", {})
    there = sum(int(status.get(field) or 0) for field in ("active", "succeeded", "failed", "terminating"))
    return there < int(spec.get("completions") or 0)


def _made(thing: Mapping[str, Any]) -> datetime:
    since = thing["metadata"].get("creationTimestamp")
    return parse_time(since) if since else _LONG_AGO


def _moment(event: Mapping[str, Any]) -> datetime:
    """When it was told last, whichever of its fields says so."""
    series = event.get("series") or {}
    found = (
        series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"),
        event.get("firstTimestamp"), event.get("metadata", {}).get("creationTimestamp"),
    )  # fmt: skip
    return max((parse_time(text) for text in found if text), default=_LONG_AGO)
