"""The health of a job's pods, diagnosed once for each decision: whether enough pods of each role serve and, if not,
why. Pure.

The pods' own statuses usually contain the cause (`trouble_of`). Some causes appear only in events, such as volumes that
cannot be mounted and pods refused by a quota or a policy. The operator does not watch all events of a cluster. If the
job does not serve and no status contains the cause, it lists the events of a few of the job's objects (`queries`).
`meaning` interprets these events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from dataloaderjob.api.sidecar import SIDECAR
from dataloaderjob.core.texts import clean
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.observed import (
    Observed,
    Trouble,
    condition_of,
    has_condition,
    leaving,
    parse_time,
    role_of,
)
from dataloaderjob_operator.decide.pod_troubles import (
    MAX_TROUBLE,
    first_trouble,
    node_silent_since,
    trouble_of,
)
from dataloaderjob_operator.decide.resource_fields import with_field
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role

SETTLE_S = 5.0
"""Seconds that an object must have waited before its events are listed."""
AGAIN_S = 10.0
"""Seconds between two requests for the events of the same job."""
PODS = 2
"""Maximum number of pods of one role whose events are listed. Most likely, the same cause holds up the other pods."""
REASONS = {
    "FailedMount": "VolumeNotMounted",
    "FailedMapVolume": "VolumeNotMounted",
    "FailedAttachVolume": "VolumeNotAttached",
    "FailedCreatePodSandBox": "SandboxNotCreated",
    "FailedPodSandBoxStatus": "SandboxNotCreated",
    "NetworkNotReady": "SandboxNotCreated",
    "FailedCreate": "PodsRefused",
}
"""Reasons of events, each with the condition reason that replaces it. Other reasons are used unchanged."""
MOVED_ON = frozenset({"Pulling", "Pulled", "Created", "Started", "SuccessfulCreate"})
"""Reasons of events that show that a pod or Job has recovered from an earlier problem."""
WAITS = "WaitsForFeeders"
"""Condition reason while trainers are not created because too few feeders serve."""
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
_NOISE = (
    (re.compile(r"\b[0-9a-f]{32,}\b"), "…"),
    (re.compile(r'^Error creating: pods "[^"]*" is '), "a pod is "),
)
"""Patterns of IDs that differ between attempts, and their replacements. A condition's text must be the same for each
attempt."""


@dataclass(frozen=True, slots=True)
class ConditionState:
    """The state of a condition, without its times."""

    holds: bool | None
    """True if the condition holds; None if unknown."""
    reason: str
    message: str = ""

    @property
    def status(self) -> Literal["True", "False", "Unknown"]:
        if self.holds is None:
            return "Unknown"
        return "True" if self.holds else "False"


@dataclass(frozen=True, slots=True)
class EventQuery:
    """An object whose events may name the cause of a problem."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Queries:
    """The events to list now, and the time until the next choice of events."""

    queries: tuple[EventQuery, ...] = ()
    again_s: float | None = None
    """Seconds until the next choice of events; None if nothing is held up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleHealth:
    """The pods of one role, and their problems."""

    role: Role
    pods: tuple[Manifest, ...]
    """Pods that are neither being deleted nor replaced by another pod."""
    trouble: Trouble | None
    """The first problem in the statuses of `pods`."""
    replaced: Trouble | None
    """The first problem of pods that their Deployment has replaced. Such pods remain after an eviction, for example."""
    culprit: Trouble | None
    """The first problem of any pod of the attempt, including pods being deleted. An evicted trainer that brings down
    the others is itself being deleted."""
    leaving: tuple[Manifest, ...]
    """Pods that are being deleted."""
    held_up: tuple[tuple[EventQuery, datetime], ...]
    """Objects whose status does not say what they wait for, each with the time at which the wait began."""
    event_trouble: Trouble | None
    """The first problem that events report, in the order of `held_up`; None if there is none."""

    @property
    def cause(self) -> Trouble | None:
        """The cause that prevents some of the pods from working."""
        return self.trouble or self.event_trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of all pods of a job, for a decision."""

    roles: Mapping[Role, RoleHealth]
    trouble: Trouble | None
    """The first problem in the statuses of pods that were not replaced, including pods being deleted."""
    head_pods: ConditionState
    """This state holds if the head's pod is ready."""
    feeder_pods: ConditionState
    """This state holds if at least `minAvailable` feeder pods are ready."""
    sidecars: ConditionState
    """This state holds if the sidecar of each trainer pod listens."""
    trainer_pods: ConditionState
    """This state holds if all trainer pods are running."""
    trainers_running: int
    """Number of trainer pods that run or have succeeded."""

    @property
    def event_trouble(self) -> Trouble | None:
        """The first problem that events report about any role, in the order of the roles; None if there is none."""
        return next((role.event_trouble for role in self.roles.values() if role.event_trouble), None)


def diagnose(observed: Observed) -> Health:
    """Diagnoses all pods, reading the status of each only once."""
    found = [(pod, trouble_of(pod)) for pod in observed.pods]
    roles = {role: _role(observed, role, found) for role in Role}
    if observed.job.spec.trainers.attached:
        theirs = [(pod, trouble_of(pod)) for pod in observed.attached]
        roles[Role.TRAINER] = _health(observed, Role.TRAINER, theirs)
    name, trainers = observed.job.name, roles[Role.TRAINER]
    needed = observed.job.spec.feeders.min_available
    return Health(
        roles=roles,
        trouble=first_trouble(trouble for pod, trouble in found if not _replaced(pod)),
        head_pods=_deployment(observed, names.head(name), roles[Role.HEAD], 1),
        feeder_pods=_deployment(observed, names.feeders(name), roles[Role.FEEDER], needed),
        sidecars=_trainer_pods(observed, trainers, sidecar_listens, "sidecars are listening"),
        trainer_pods=_trainer_pods(observed, trainers, trains, "trainer pods are running"),
        trainers_running=_doing(observed, trainers, trains),
    )


def queries(roles: Iterable[RoleHealth], now: datetime) -> Queries:
    """Chooses the events to list for roles that do not fully serve."""
    found, waits = [], []
    for role in roles:
        if role.trouble is not None:
            continue
        chosen = 0
        for query, since in role.held_up:
            age = (now - since).total_seconds()
            if age < SETTLE_S:
                waits.append(SETTLE_S - age)
            elif query.kind == "Job" or chosen < PODS:
                chosen += query.kind == "Pod"
                found.append(query)
                waits.append(AGAIN_S)
    return Queries(tuple(found), min(waits, default=None))


def meaning(query: EventQuery, events: Iterable[Mapping[str, Any]]) -> Trouble | None:
    """Returns the problem that the newest Warning event reports. Returns None if there is no such event, or the object
    has recovered since."""
    found = sorted(events, key=moment_of)
    warnings = [event for event in found if event.get("type") == "Warning"]
    if not warnings:
        return None
    newest = warnings[-1]
    if any(e.get("reason") in MOVED_ON and moment_of(e) > moment_of(newest) for e in found):
        return None
    reason = str(newest.get("reason") or "")
    known = REASONS.get(reason) or (reason if re.fullmatch("[A-Z][A-Za-z0-9]{1,63}", reason) else "Warning")
    text = str(newest.get("message") or reason)
    for pattern, instead in _NOISE:
        text = pattern.sub(instead, text)
    if query.kind == "Job":  # only trainers have a Job
        text = with_field(text, Role.TRAINER)
    return Trouble(query.name, "", known, clean(text, MAX_TROUBLE), kind=query.kind.replace("Pod", "pod"))


_Diagnosed = Sequence[tuple[Manifest, Trouble | None]]


def _role(observed: Observed, role: Role, found: _Diagnosed) -> RoleHealth:
    return _health(observed, role, [(pod, trouble) for pod, trouble in found if role_of(pod) == role])


def _health(observed: Observed, role: Role, every: _Diagnosed) -> RoleHealth:
    there = [(pod, trouble) for pod, trouble in every if not leaving(pod)]
    mine = [(pod, trouble) for pod, trouble in there if not _replaced(pod)]
    held_up = tuple(_held_up(observed, role, mine))
    reported = (observed.event_troubles.get(query.uid) for query, _ in held_up)
    return RoleHealth(
        role=role,
        pods=tuple(pod for pod, _ in mine),
        trouble=first_trouble(trouble for _, trouble in mine),
        replaced=first_trouble(trouble for pod, trouble in there if _replaced(pod)),
        culprit=first_trouble(trouble for pod, trouble in every if _of_attempt(pod, observed.attempt)),
        leaving=tuple(pod for pod, _ in every if leaving(pod)),
        held_up=held_up,
        event_trouble=next((trouble for trouble in reported if trouble is not None), None),
    )


def _replaced(pod: Manifest) -> bool:
    """Returns True if a pod has ended and its Deployment has replaced it."""
    ended = pod.get("status", {}).get("phase") in {"Failed", "Succeeded"}
    return ended and role_of(pod) != Role.TRAINER


def _of_attempt(pod: Manifest, attempt: int) -> bool:
    """Returns True if a pod belongs to this attempt. Pods of the head and the feeders belong to all attempts."""
    return str(pod["metadata"].get("labels", {}).get(names.LABEL_ATTEMPT, attempt)) == str(attempt)


def _deployment(observed: Observed, name: str, health: RoleHealth, needed: int) -> ConditionState:
    live, role = observed.children.get(("Deployment", name)), health.role.value
    if live is None:
        return ConditionState(None, "NotMade", f"Deployment {name} does not exist yet")
    ready = int(live.get("status", {}).get("readyReplicas") or 0)
    if ready >= needed:
        return ConditionState(True, "Serving", f"{role} pods ready: {needed} or more")
    if (cause := health.cause) is not None:
        return ConditionState(False, cause.reason, str(cause))
    refused = condition_of(live, "ReplicaFailure")
    if refused is not None and refused["status"] == "True":
        text = with_field(refused.get("message", ""), health.role)
        return ConditionState(False, refused.get("reason") or "PodsRefused", text)
    if health.replaced is not None:
        return ConditionState(False, health.replaced.reason, str(health.replaced))
    return _starts(health, f"{role} pods ready: {ready} of {needed} required")


def _trainer_pods(
    observed: Observed, health: RoleHealth, does: Callable[[Mapping[str, Any]], bool], what: str
) -> ConditionState:
    """Returns the state of the trainer pods. The state holds if all `replicas` pods satisfy `does`."""
    job = observed.children.get(("Job", names.trainers(observed.job.name, observed.attempt)))
    if job is not None and suspended(job):
        name = job["metadata"]["name"]
        return ConditionState(
            False, "JobSuspended", f"Job {name} is suspended by its queue (Kueue, for example)"
        )
    needed = observed.job.spec.trainers.replicas
    found = _doing(observed, health, does)
    if found >= needed:
        return ConditionState(True, "Serving", f"{found} of {needed} {what}")
    if (cause := health.cause) is not None:
        return ConditionState(False, cause.reason, str(cause))
    if not health.pods and not health.leaving and observed.waits_for_feeders(observed.attempt):
        return ConditionState(False, WAITS, _waiting(observed))
    return _starts(health, f"{found} of {needed} {what}")


def _waiting(observed: Observed) -> str:
    serving, least = observed.serving(), observed.job.spec.feeders.min_available
    missing = least - serving
    return (
        f"trainers start once {least} feeder pods are serving (feeders.minAvailable); serving: {serving}, "
        f"missing: {missing}"
    )


def _starts(health: RoleHealth, count: str) -> ConditionState:
    """Returns the state of pods that are starting without a known problem. They may be waiting for pods that are being
    deleted."""
    if not health.leaving:
        return ConditionState(False, "PodsStart", count)
    first = min(health.leaving, key=lambda pod: str(pod["metadata"]["deletionTimestamp"]))["metadata"]
    text = f"{count}; pod {first['name']} has been terminating since {first['deletionTimestamp']}"
    return ConditionState(False, "PodsLeave", text)


def _doing(observed: Observed, health: RoleHealth, does: Callable[[Mapping[str, Any]], bool]) -> int:
    there = [pod for pod in health.pods if node_silent_since(pod) is None]
    return sum(does(pod.get("status") or {}) for pod in there) + _succeeded_and_gone(observed, health)


def _succeeded_and_gone(observed: Observed, health: RoleHealth) -> int:
    """Returns the number of trainers that succeeded and whose pods are gone."""
    live = observed.children.get(("Job", names.trainers(observed.job.name, observed.attempt)), {})
    ended = int(live.get("status", {}).get("succeeded") or 0)
    there: int = sum((pod.get("status") or {}).get("phase") == "Succeeded" for pod in health.pods)
    return max(0, ended - there)


def sidecar_listens(status: Mapping[str, Any]) -> bool:
    """Returns True if a sidecar's container has started. The sidecar of a pod that succeeded counts as listening."""
    containers = status.get("initContainerStatuses") or ()
    return _ended_well(status) or any(
        container.get("name") == SIDECAR and container.get("started") for container in containers
    )


def _ended_well(status: Mapping[str, Any]) -> bool:
    """Returns True if a pod succeeded, judging by its containers' exit codes. These are known a little before the pod's
    phase."""
    codes = [
        c.get("state", {}).get("terminated", {}).get("exitCode")
        for c in status.get("containerStatuses") or ()
    ]
    return status.get("phase") == "Succeeded" or (bool(codes) and all(code == 0 for code in codes))


def trains(status: Mapping[str, Any]) -> bool:
    states = [container.get("state", {}) for container in status.get("containerStatuses") or ()]
    return status.get("phase") in {"Running", "Succeeded"} and all(
        "running" in state or state.get("terminated", {}).get("exitCode") == 0 for state in states
    )


def _held_up(observed: Observed, role: Role, found: _Diagnosed) -> Iterator[tuple[EventQuery, datetime]]:
    """Yields objects whose status does not say what they wait for, sorted by name. Each item also has the time at which
    the wait began."""
    for pod, trouble in sorted(found, key=lambda each: str(each[0]["metadata"]["name"])):
        if trouble is None and (since := _waits_on_node(pod)) is not None:
            yield EventQuery("Pod", pod["metadata"]["name"], pod["metadata"].get("uid", "")), since
    if role is Role.TRAINER:
        job = observed.children.get(("Job", names.trainers(observed.job.name, observed.attempt)))
        if job is not None and _short_of_pods(job):
            yield EventQuery("Job", job["metadata"]["name"], job["metadata"].get("uid", "")), _made(job)


def _waits_on_node(pod: Mapping[str, Any]) -> datetime | None:
    """Returns the time since which a pod has had a node but no container; None for any other pod."""
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


def suspended(job: Mapping[str, Any]) -> bool:
    """Returns True if an Indexed Job is suspended. The operator itself never suspends one."""
    held = job.get("spec", {}).get("suspend") or has_condition(job, "Suspended")
    return bool(held) and not leaving(job)


def _short_of_pods(job: Mapping[str, Any]) -> bool:
    """Returns True if an Indexed Job that should run has fewer pods than completions."""
    if (
        leaving(job)
        or suspended(job)
        or any(
            has_condition(job, kind) for kind in ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
        )
    ):
        return False
    spec, status = job.get("spec", {}), job.get("status", {})
    there = sum(int(status.get(field) or 0) for field in ("active", "succeeded", "failed", "terminating"))
    return there < int(spec.get("completions") or 0)


def _made(thing: Mapping[str, Any]) -> datetime:
    since = thing["metadata"].get("creationTimestamp")
    return parse_time(since) if since else _LONG_AGO


def moment_of(event: Mapping[str, Any]) -> datetime:
    """Returns the time at which an event was last observed, from whichever field holds it."""
    series = event.get("series") or {}
    found = (
        series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"),
        event.get("firstTimestamp"), event.get("metadata", {}).get("creationTimestamp"),
    )  # fmt: skip
    return max((parse_time(text) for text in found if text), default=_LONG_AGO)
