"""The life of a job, as a table: where it is, and which children it has there. Pure.

STARTING    children are being made; head, sidecars and feeders do not serve yet
RUNNING     they served once; the trainers train
RESTARTING  a trainer failed; all of them are made anew, as a further attempt
SUSPENDING  its pods are leaving
SUSPENDED   no pod is left
COMPLETE    all trainers ended with exit code 0
FAILED      it ended otherwise
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.health import Health
from dataloaderjob_operator.decide.observed import Observed, Trainers, condition_of, parse_time


class Stage(StrEnum):
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Part(StrEnum):
    """Children that are made and deleted together."""

    BASE = "base"
    FEEDING = "feeding"
    TRAINERS = "trainers"


WANTED: dict[Stage, frozenset[Part]] = {
    Stage.STARTING: frozenset(Part),
    Stage.RUNNING: frozenset(Part),
    Stage.RESTARTING: frozenset(Part),
    Stage.SUSPENDING: frozenset({Part.BASE}),
    Stage.SUSPENDED: frozenset({Part.BASE}),
    Stage.COMPLETE: frozenset({Part.BASE}),
    Stage.FAILED: frozenset({Part.BASE}),
}
KEPT: dict[Stage, frozenset[Part]] = {
    Stage.COMPLETE: frozenset({Part.TRAINERS}),
    Stage.FAILED: frozenset({Part.TRAINERS}),
}
"""Neither made nor deleted once they have ended: the trainers' pods have the logs. Those that a deadline has caught go,
with what they hold."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """The stage that a job is in, and why."""

    stage: Stage
    reason: str
    """CamelCase, for the condition."""
    message: str = ""
    attempt: int = 0
    """The attempt whose trainers shall be there."""


def find(observed: Observed, health: Health, now: datetime, *, serves: bool, up: bool) -> StageResult:
    """Decides by the first rule that applies. `serves`: head, sidecars and feeders serve and trainers run; `up`: as far
    as pods show, the job has come up."""
    before = observed.status
    attempt = observed.attempt
    for kind, stage in ((ConditionType.COMPLETE, Stage.COMPLETE), (ConditionType.FAILED, Stage.FAILED)):
        ended = before.condition(kind)
        if ended is not None and ended.status == "True":
            return StageResult(stage, ended.reason, ended.message, attempt)
    trainers = observed.trainers()
    if trainers is Trainers.COMPLETE:
        return StageResult(
            Stage.COMPLETE, "TrainersSucceeded", "all trainers ended with exit code 0", attempt
        )
    if observed.job.spec.suspend:
        if observed.pods:
            return StageResult(
                Stage.SUSPENDING, "PodsLeave", f"{len(observed.pods)} pods are leaving", attempt
            )
        return StageResult(Stage.SUSPENDED, "AskedFor", "spec.suspend is true", attempt)
    if (late := _late(observed, health, now, up=up)) is not None:
        return late
    if trainers is Trainers.FAILED:
        return _failed(observed, health, attempt)
    if _served(observed) or serves:
        return StageResult(Stage.RUNNING, "Serving", "", attempt)
    return StageResult(Stage.STARTING, "ChildrenStart", "", attempt)


def _late(observed: Observed, health: Health, now: datetime, *, up: bool) -> StageResult | None:
    """Judges the deadlines; None if none is over."""
    if observed.status.start_time is None:
        return None
    elapsed = now - parse_time(observed.status.start_time)
    limits = observed.job.spec.deadlines
    active = limits.active_deadline_seconds
    if active is not None and elapsed >= timedelta(seconds=active):
        return StageResult(
            Stage.FAILED, "DeadlineExceeded",
            f"the job took longer than deadlines.activeDeadlineSeconds {active}", observed.attempt,
        )  # fmt: skip
    if not up and not _served(observed) and elapsed >= timedelta(seconds=limits.startup_seconds):
        trouble, supervisor = health.trouble or health.event_trouble, observed.supervisor
        cause = ""
        if supervisor is not None:
            cause = observed.describe(supervisor.cause) if supervisor.cause is not None else supervisor.silent
        cause = observed.refused or cause
        why = f": {trouble or cause}" if trouble or cause else ""
        return StageResult(
            Stage.FAILED, "StartupDeadlineExceeded",
            f"the job was not up within deadlines.startupSeconds {limits.startup_seconds}{why}", observed.attempt,
        )  # fmt: skip
    return None


def _failed(observed: Observed, health: Health, attempt: int) -> StageResult:
    """All trainers are started anew after one failed, as often as the manifest allows."""
    trouble = health.roles[names.Role.TRAINER].trouble
    job = observed.children[("Job", names.trainers(observed.job.name, attempt))]
    message = (condition_of(job, "Failed") or condition_of(job, "FailureTarget") or {}).get("message", "")
    cause = str(trouble) if trouble else message or "a trainer failed"
    if observed.supervisor is not None and observed.supervisor.failure is not None:
        cause += f"; {observed.describe(observed.supervisor.failure)}"
    limit = observed.job.spec.backoff_limit
    if attempt >= limit:
        return StageResult(Stage.FAILED, "BackoffLimitExceeded", f"{cause} (backoffLimit {limit})", attempt)
    return StageResult(
        Stage.RESTARTING, "TrainerFailed", f"{cause}; restart {attempt + 1} of {limit}", attempt + 1
    )


def _served(observed: Observed) -> bool:
    """Checks whether the startup deadline is met, since the job began or was resumed: all parts served once, or a
    trainer has been made anew since."""
    return observed.status.phase in {Phase.RUNNING, Phase.DEGRADED}
