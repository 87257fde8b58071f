"""The feeders that a job lacks while it serves: those that are missing, and new ones that do not take the place of old
ones while an update rolls. Pure.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from dataloaderjob.core.supervision import Cause
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.health import ConditionState, Health, RoleHealth
from dataloaderjob_operator.decide.observed import (
    KILLED_S,
    Observed,
    condition_of,
    first_trouble,
    has_condition,
    killed_of_late,
)
from dataloaderjob_operator.decide.resource_fields import with_field
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import Role

LATE = "ProgressDeadlineExceeded"
"""Kubernetes' reason for a Deployment none of whose new pods has become ready for long."""


def shortage(observed: Observed, health: Health, now: datetime) -> ConditionState | None:
    """Fewer feeders serve than are asked for, or an update of them is under way, and why; None if there are enough."""
    feeders = health.roles[Role.FEEDER]
    wanted, serving = observed.job.spec.feeders.replicas, observed.serving()
    live = observed.children.get(("Deployment", names.feeders(observed.job.name)), {"metadata": {}})
    cause = str(feeders.cause or "") or _refused(live)
    killed_pod = first_trouble(killed_of_late(pod, now) for pod in feeders.pods)
    told = None if observed.supervisor is None else observed.supervisor.cause
    killed = told is not None and told.reason == Cause.OUT_OF_MEMORY
    if serving >= wanted:
        # Feeders that serve again are killed again: nobody else tells why the job is slow.
        text = observed.describe(told) if told and killed else str(killed_pod or "")
        short = ConditionState(True, Cause.OUT_OF_MEMORY, text) if text else None
        return short or _rollout(live, feeders, wanted, cause)
    if cause:
        killed = feeders.cause is not None and feeders.cause.reason == Cause.OUT_OF_MEMORY
    elif told is not None:
        cause = observed.describe(told)
    count = f"feeder pods that serve: {serving} of {wanted}"
    reason = Cause.OUT_OF_MEMORY.value if killed else "FeedersMissing" if cause else "FeedersStart"
    return ConditionState(True, reason, f"{count}; {cause}" if cause else count)


def told_until(health: Health, now: datetime) -> datetime | None:
    """The moment at which a want of memory that killed a feeders' container is told no longer; None if none is told."""
    found = first_trouble(killed_of_late(pod, now) for pod in health.roles[Role.FEEDER].pods)
    return None if found is None or found.ended_at is None else found.ended_at + timedelta(seconds=KILLED_S)


def _rollout(live: Manifest, feeders: RoleHealth, wanted: int, cause: str) -> ConditionState | None:
    """The update that replaces feeders' pods, and what it is stuck at: no old pod is given up for a new one that is not
    ready."""
    status = live.get("status", {})
    made, there = (int(status.get(name) or 0) for name in ("updatedReplicas", "replicas"))
    if made >= there:
        return None
    cause = cause or _late(live, feeders)
    if cause:
        return ConditionState(
            True, "RolloutStuck", f"feeders that are being rolled out cannot start: {cause}"
        )
    return ConditionState(True, "FeedersRoll", f"feeder pods that are replaced: {made} of {wanted} are made")


def _refused(live: Manifest) -> str:
    """What the API server says of pods that it does not take, such as for a quota."""
    refused = condition_of(live, "ReplicaFailure") or {}
    return with_field(str(refused.get("message", "")), Role.FEEDER) if refused.get("status") == "True" else ""


def _late(live: Manifest, feeders: RoleHealth) -> str:
    """New pods whose status shows nothing wrong, and that are not ready for all that."""
    progress = condition_of(live, "Progressing") or {}
    if progress.get("status") != "False" or progress.get("reason") != LATE:
        return ""
    waiting = sorted(str(pod["metadata"]["name"]) for pod in feeders.pods if not has_condition(pod, "Ready"))
    if not waiting:
        return str(progress.get("message", LATE))
    seconds = live.get("spec", {}).get("progressDeadlineSeconds")
    return f"pod {waiting[0]} has not become ready within {seconds} s: its log says more"
