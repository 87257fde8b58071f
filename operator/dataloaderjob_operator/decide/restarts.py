"""Restarts of failed trainers: whether a failure counts, when the next attempt starts, and how long the operator waits
for the previous attempt's pods. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto

from dataloaderjob.api.status import ConditionType
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.health import Health
from dataloaderjob_operator.decide.observed import (
    Observed,
    Pod,
    Trainers,
    Trouble,
    condition_of,
    leaving,
    parse_time,
    show_time,
)
from dataloaderjob_operator.decide.pod_troubles import (
    first_exit_codes,
    first_trouble,
    node_of,
    node_silent_since,
    trouble_of,
)

LONGEST_PAUSE_S = 300.0
"""Maximum pause before a restart, in seconds; equal to the kubelet's for containers."""
MAX_DISRUPTIONS = 50
"""Number of consecutive disruptions without progress after which a job fails. The disruptions and the pauses between
them then take four hours."""
FORGETS_AFTER_S = 600.0
"""Seconds for which trainers must run and take batches until earlier restarts are forgotten."""
AGAIN_S = 30.0
"""Seconds between checks of trainers that have run for FORGETS_AFTER_S but take no batches."""
SETTLE_S = 5.0
"""Seconds for which the pods' statuses may lag behind the status of their Job. Each kind has its own watch."""
STUCK_S = 60.0
"""Seconds from the end of a pod's grace period until the pod counts as stuck."""
SILENT_GRACE_S = 30.0
"""Maximum grace period in seconds for a pod whose node does not answer. Nothing can ask such a pod to terminate."""


class FailureKind(Enum):
    """The kinds of an attempt's failures."""

    COUNTED = auto()
    IGNORED = auto()
    FATAL = auto()
    UNKNOWN = auto()
    """No pod shows the cause yet."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of an attempt, and its cause as text."""

    kind: FailureKind
    cause: str


@dataclass(frozen=True, slots=True)
class Tally:
    """The counts of restarts since the last progress, and the time of the next restart."""

    failures: int = 0
    disruptions: int = 0
    next_start: str | None = None


def judge(observed: Observed, health: Health, now: datetime) -> Failure:
    """Judges the attempt whose Job has failed."""
    policy, role = observed.job.spec.trainers.own.failure_policy, health.roles[names.Role.TRAINER]
    pods = attempt_pods(observed)
    disruption = first_trouble(t for t in map(trouble_of, pods) if t and t.is_disruption)
    failed = [pod for pod in pods if not leaving(pod) and first_exit_codes([pod])]
    cause = _cause(observed, disruption or role.culprit)
    ignored = FailureKind.IGNORED if policy.ignore_disruptions else FailureKind.COUNTED
    if disruption is not None:
        return Failure(ignored, cause)
    if not failed and _age_s(observed, now) < SETTLE_S:
        return Failure(FailureKind.UNKNOWN, cause)
    if not failed and _deleted(observed, pods):
        return Failure(ignored, f"{cause}; a trainer pod was deleted")
    action, rule = policy.action(first_exit_codes(failed))
    kind = {"FailJob": FailureKind.FATAL, "Ignore": FailureKind.IGNORED, "Count": FailureKind.COUNTED}[action]
    return Failure(kind, f"{cause} ({rule})" if rule else cause)


def attempt_pods(observed: Observed) -> list[Pod]:
    """Returns the trainer pods of the current attempt, including those being deleted."""
    pods = observed.of_role(names.Role.TRAINER)
    return [pod for pod in pods if _attempt_of(pod) in (None, str(observed.attempt))]


def tally_of(observed: Observed) -> Tally:
    """Returns the counts that were last written."""
    found = observed.status.trainers
    return Tally(found.failures, found.disruptions, found.next_start)


def counted(observed: Observed, kind: FailureKind, now: datetime) -> Tally:
    """Returns the counts after this failure, and the time of the next attempt. After the first disruption, there is no
    pause."""
    before, first_s = tally_of(observed), observed.job.spec.trainers.own.failure_policy.backoff_seconds
    is_disruption = kind is FailureKind.IGNORED
    failures, disruptions = before.failures + (not is_disruption), before.disruptions + is_disruption
    pause_s = pause(float(first_s), failures + disruptions - (1 if is_disruption else 0))
    start = now + timedelta(seconds=pause_s)
    return Tally(failures, disruptions, show_time(start) if pause_s else None)


def pause(first_s: float, times: int) -> float:
    """Returns the seconds to wait before the `times`-th consecutive restart; 0 if `times` is less than 1."""
    return 0.0 if times < 1 else min(LONGEST_PAUSE_S, first_s * 2.0 ** min(times - 1, 16))


def waits_until(observed: Observed, now: datetime) -> datetime | None:
    """Returns the time at which the next attempt starts; None if no start is planned, or the time has passed."""
    text = observed.status.trainers.next_start
    if text is None or observed.trainers() is not Trainers.ABSENT:
        return None
    moment = parse_time(text)
    return moment if moment > now else None


def forgets_at(observed: Observed) -> datetime | None:
    """Returns the time after which progress resets the restart counts. Returns None if there were no restarts, or the
    trainers do not run."""
    found, runs = observed.status.trainers, observed.status.condition(ConditionType.TRAINERS_READY)
    if not (found.failures or found.disruptions) or runs is None or runs.status != "True":
        return None
    return parse_time(runs.last_transition_time) + timedelta(seconds=FORGETS_AFTER_S)


def makes_progress(observed: Observed) -> bool:
    """Returns True if trainers take batches, according to the supervisor."""
    supervisor = observed.supervisor
    rates = None if supervisor is None or supervisor.silent else supervisor.rates
    return rates is not None and rates.batches_per_s > 0.0


# Pods that do not terminate


def stuck_at(pod: Pod) -> datetime | None:
    """Returns the time from which the operator no longer waits for a pod that is being deleted; None for any other
    pod."""
    metadata = pod["metadata"]
    if not leaving(pod):
        return None
    due = parse_time(metadata["deletionTimestamp"])
    if node_silent_since(pod) is None:
        return due + timedelta(seconds=STUCK_S)
    grace_s = float(metadata.get("deletionGracePeriodSeconds") or 0.0)
    return due - timedelta(seconds=grace_s) + timedelta(seconds=min(grace_s, SILENT_GRACE_S))


def stuck(observed: Observed, now: datetime) -> list[Pod]:
    """Returns the pods that should have terminated by now."""
    moments = ((pod, stuck_at(pod)) for pod in observed.pods)
    return [pod for pod, moment in moments if moment is not None and moment <= now]


def next_stuck(observed: Observed, now: datetime) -> datetime | None:
    """Returns the next time at which the operator stops waiting for a pod, or for a Job without pods."""
    jobs = (child for (kind, _), child in observed.children.items() if kind == "Job" and leaving(child))
    moments = [
        *map(stuck_at, observed.pods),
        *(moment for job in jobs for moment in _stuck_at(observed, job)),
    ]
    return min((moment for moment in moments if moment is not None and moment > now), default=None)


def describe_stuck(pods: Sequence[Pod]) -> str:
    """Names the first of these stuck pods, its node, and the remedy."""
    first = min(pods, key=lambda pod: str(pod["metadata"]["name"]))
    metadata, node = first["metadata"], node_of(first)
    where = f" on node {node}" if node else ""
    silent = ", which does not respond" if node_silent_since(first) else ""
    more = f" (and {len(pods) - 1} more)" if len(pods) > 1 else ""
    return (
        f"pod {metadata['name']}{where}{silent} should have terminated by {metadata['deletionTimestamp']}{more}; the"
        " operator no longer waits for it. If the node is lost, delete it or taint it node.kubernetes.io/out-of-service"
    )


def holds_up(observed: Observed, attempt: int, now: datetime) -> bool:
    """Returns True if trainers of another attempt still hold resources that this attempt needs. A Job deleted in the
    foreground exists as long as its pods do."""
    wanted = ("Job", names.trainers(observed.job.name, attempt))
    others = [child for key, child in observed.children.items() if key[0] == "Job" and key != wanted]
    return any(not leaving(child) or not _given_up(observed, child, now) for child in others)


def own_name_is_held(observed: Observed, now: datetime) -> bool:
    """Returns True if the current attempt's Job cannot be deleted because its pods are stuck. The next attempt's Job
    gets a different name."""
    live = observed.children.get(("Job", names.trainers(observed.job.name, observed.attempt)))
    return live is not None and leaving(live) and _given_up(observed, live, now)


def describe_holder(observed: Observed) -> str:
    """Describes the objects that still hold the name of the current attempt's Job."""
    if pods := attempt_pods(observed):
        return describe_stuck(pods)
    name = names.trainers(observed.job.name, observed.attempt)
    since = observed.children["Job", name]["metadata"]["deletionTimestamp"]
    return (
        f"Job {name} has no pods, but has been terminating since {since}; the operator no longer waits for it"
    )


def _given_up(observed: Observed, job: Pod, now: datetime) -> bool:
    return all(moment is not None and moment <= now for moment in _stuck_at(observed, job))


def _stuck_at(observed: Observed, job: Pod) -> list[datetime | None]:
    """Returns the times from which the operator no longer waits for the pods of a Job being deleted. If the Job has no
    pods, returns the time for the Job itself."""
    labels = job["metadata"].get("labels", {})
    attempt = labels.get(names.LABEL_ATTEMPT, str(observed.attempt))
    mine = observed.of_role(names.Role.TRAINER)
    pods = [pod for pod in mine if (_attempt_of(pod) or str(observed.attempt)) == attempt]
    own = parse_time(job["metadata"]["deletionTimestamp"]) + timedelta(seconds=STUCK_S)
    return [stuck_at(pod) for pod in pods] or [own]


def _attempt_of(pod: Pod) -> str | None:
    found = pod["metadata"].get("labels", {}).get(names.LABEL_ATTEMPT)
    return None if found is None else str(found)


def _failed_condition(observed: Observed) -> dict[str, str]:
    job = observed.children[("Job", names.trainers(observed.job.name, observed.attempt))]
    return dict(condition_of(job, "FailureTarget") or condition_of(job, "Failed") or {})


def _age_s(observed: Observed, now: datetime) -> float:
    since = _failed_condition(observed).get("lastTransitionTime")
    return (now - parse_time(since)).total_seconds() if since else SETTLE_S


def _cause(observed: Observed, trouble: Trouble | None) -> str:
    cause = str(trouble) if trouble else _failed_condition(observed).get("message") or "a trainer failed"
    if observed.supervisor is not None and observed.supervisor.failure is not None:
        cause += f"; {observed.describe(observed.supervisor.failure)}"
    return cause


def _deleted(observed: Observed, pods: Sequence[Pod]) -> bool:
    """Returns True if someone deleted a pod. A pod that fails on its own remains, and shows its failure."""
    live = observed.children[("Job", names.trainers(observed.job.name, observed.attempt))]
    missing = observed.job.spec.trainers.replicas - len(pods)
    gone = missing > 0 and int(live.get("status", {}).get("failed") or 0) > 0
    return gone or any(map(leaving, pods))
