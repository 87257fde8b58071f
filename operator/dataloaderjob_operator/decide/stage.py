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
from dataloaderjob_operator.decide import event_causes, troubles
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
    """Children that come and go together."""

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
    """A stage, and why."""

    stage: Stage
    reason: str
    """CamelCase, for the condition."""
    message: str = ""
    attempt: int = 0
    """Of the trainers that shall be there."""


def find(seen: Observed, now: datetime, *, serves: bool, up: bool) -> StageResult:
    """`serves`: whether head, sidecars and feeders do; `up`: whether pods look like it, for all
    that is known. The first rule that applies decides."""
    before = seen.status
    attempt = seen.attempt
    for kind, stage in ((ConditionType.COMPLETE, Stage.COMPLETE), (ConditionType.FAILED, Stage.FAILED)):
        ended = before.condition(kind)
        if ended is not None and ended.status == "True":
            return StageResult(stage, ended.reason, ended.message, attempt)
    trainers = seen.trainers()
    if trainers is Trainers.COMPLETE:
        return StageResult(
            Stage.COMPLETE, "TrainersSucceeded", "all trainers ended with exit code 0", attempt
        )
    if seen.job.spec.suspend:
        if seen.pods:
            return StageResult(Stage.SUSPENDING, "PodsLeave", f"{len(seen.pods)} pods are leaving", attempt)
        return StageResult(Stage.SUSPENDED, "AskedFor", "spec.suspend is true", attempt)
    if (late := _late(seen, now, up=up)) is not None:
        return late
    if trainers is Trainers.FAILED:
        return _failed(seen, attempt)
    if _served(seen) or serves:
        return StageResult(Stage.RUNNING, "Serving", "", attempt)
    return StageResult(Stage.STARTING, "ChildrenStart", "", attempt)


def _late(seen: Observed, now: datetime, *, up: bool) -> StageResult | None:
    """The deadline that is over, if one is."""
    if seen.status.start_time is None:
        return None
    elapsed = now - parse_time(seen.status.start_time)
    limits = seen.job.spec.deadlines
    active = limits.active_deadline_seconds
    if active is not None and elapsed >= timedelta(seconds=active):
        return StageResult(
            Stage.FAILED, "DeadlineExceeded", f"longer than deadlines.activeDeadlineSeconds {active}", seen.attempt
        )  # fmt: skip
    if not up and not _served(seen) and elapsed >= timedelta(seconds=limits.startup_seconds):
        trouble, answer = troubles.first(seen.pods) or event_causes.told(seen, *names.Role), seen.answer
        cause = ""
        if answer is not None:
            cause = seen.told(answer.cause) if answer.cause is not None else answer.silent
        cause = seen.refused or cause
        why = f": {trouble or cause}" if trouble or cause else ""
        return StageResult(
            Stage.FAILED, "StartupDeadlineExceeded",
            f"not up within deadlines.startupSeconds {limits.startup_seconds}{why}", seen.attempt,
        )  # fmt: skip
    return None


def _failed(seen: Observed, attempt: int) -> StageResult:
    """One trainer failed: again from the start with all, as often as allowed."""
    trouble = troubles.first(seen.of_role(names.Role.TRAINER))
    job = seen.children[("Job", names.trainers(seen.job.name, attempt))]
    said = (condition_of(job, "Failed") or condition_of(job, "FailureTarget") or {}).get("message", "")
    cause = str(trouble) if trouble else said or "a trainer failed"
    if seen.answer is not None and seen.answer.failure is not None:
        cause += f"; {seen.told(seen.answer.failure)}"
    limit = seen.job.spec.backoff_limit
    if attempt >= limit:
        return StageResult(Stage.FAILED, "BackoffLimitExceeded", f"{cause} (backoffLimit {limit})", attempt)
    return StageResult(
        Stage.RESTARTING, "TrainerFailed", f"{cause}; restart {attempt + 1} of {limit}", attempt + 1
    )


def _served(seen: Observed) -> bool:
    """Whether the startup deadline is met, since the job began or was resumed: all served once, or a trainer has been
    made anew since."""
    return seen.status.phase in {Phase.RUNNING, Phase.DEGRADED}
