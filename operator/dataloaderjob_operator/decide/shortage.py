"""The feeders that a serving job lacks: missing feeders, and new feeders that fail to replace old ones in a rolling
update. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from dataloaderjob.core.supervision import Cause
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.health import ConditionState, Health, RoleHealth
from dataloaderjob_operator.decide.observed import Observed, condition_of, has_condition
from dataloaderjob_operator.decide.pod_troubles import KILLED_S, first_trouble, killed_of_late
from dataloaderjob_operator.decide.resource_fields import with_field
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role

LATE = "ProgressDeadlineExceeded"
"""The reason with which Kubernetes reports that no pod of a Deployment became ready within its progress deadline."""


def shortage(observed: Observed, health: Health, now: datetime) -> ConditionState | None:
    """Returns the cause if fewer feeders serve than wanted, or if feeders run out of memory. Otherwise returns the
    state of a rolling update, or None if none is in progress."""
    feeders = health.roles[Role.FEEDER]
    wanted, serving = observed.job.spec.feeders.replicas, observed.serving()
    live = observed.children.get(("Deployment", names.feeders(observed.job.name)), {"metadata": {}})
    cause = str(feeders.cause or "") or _refused(live)
    killed_pod = first_trouble(killed_of_late(pod, now) for pod in feeders.pods)
    told = None if observed.supervisor is None else observed.supervisor.cause
    killed = told is not None and told.reason == Cause.OUT_OF_MEMORY
    if serving >= wanted:
        # Feeders that serve again will be killed again, and nothing else shows why the job is slow.
        text = observed.describe(told) if told and killed else str(killed_pod or "")
        short = ConditionState(True, Cause.OUT_OF_MEMORY, text) if text else None
        return short or _rollout(live, feeders, wanted, cause)
    if cause:
        killed = feeders.cause is not None and feeders.cause.reason == Cause.OUT_OF_MEMORY
    elif told is not None:
        cause = observed.describe(told)
    count = f"feeder pods serving: {serving} of {wanted}"
    reason = Cause.OUT_OF_MEMORY.value if killed else "FeedersMissing" if cause else "FeedersStart"
    return ConditionState(True, reason, f"{count}; {cause}" if cause else count)


def told_until(health: Health, now: datetime) -> datetime | None:
    """Returns the time until which a feeder container's out-of-memory kill is reported; None if none is reported."""
    found = first_trouble(killed_of_late(pod, now) for pod in health.roles[Role.FEEDER].pods)
    return None if found is None or found.ended_at is None else found.ended_at + timedelta(seconds=KILLED_S)


def _rollout(live: Manifest, feeders: RoleHealth, wanted: int, cause: str) -> ConditionState | None:
    """Returns the state of a rolling update of feeder pods, with the obstacle if it is stuck; None if no update is in
    progress. No old pod is deleted before a new one is ready."""
    status = live.get("status", {})
    made, there = (int(status.get(name) or 0) for name in ("updatedReplicas", "replicas"))
    if made >= there:
        return None
    cause = cause or _late(live, feeders)
    if cause:
        return ConditionState(
            True, "RolloutStuck", f"the new feeders of a rolling update cannot start: {cause}"
        )
    return ConditionState(True, "FeedersRoll", f"rolling update of feeder pods: {made} of {wanted} created")


def _refused(live: Manifest) -> str:
    """Returns the API server's message about pods that it refuses, for instance because of a quota; empty if it refuses
    none."""
    refused = condition_of(live, "ReplicaFailure") or {}
    return with_field(str(refused.get("message", "")), Role.FEEDER) if refused.get("status") == "True" else ""


def _late(live: Manifest, feeders: RoleHealth) -> str:
    """Describes a new pod that is not ready although its status shows nothing wrong; empty if there is none."""
    progress = condition_of(live, "Progressing") or {}
    if progress.get("status") != "False" or progress.get("reason") != LATE:
        return ""
    waiting = sorted(str(pod["metadata"]["name"]) for pod in feeders.pods if not has_condition(pod, "Ready"))
    if not waiting:
        return str(progress.get("message", LATE))
    seconds = live.get("spec", {}).get("progressDeadlineSeconds")
    return f"pod {waiting[0]} did not become ready within {seconds} s: see its log"
