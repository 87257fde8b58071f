"""The stage of a job's life, and the children wanted in that stage. The first rule that applies determines the stage.
Pure: callers pass the time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob_operator.decide import attached, external, restarts
from dataloaderjob_operator.decide.followed import FollowedState
from dataloaderjob_operator.decide.health import ConditionState, Health
from dataloaderjob_operator.decide.job_parts import Parts, serves
from dataloaderjob_operator.decide.observed import Observed, Trainers, parse_time
from dataloaderjob_operator.decide.queueing import QueuedRole
from dataloaderjob_operator.decide.restarts import FailureKind, Tally
from dataloaderjob_operator.names import Role

CHILDREN_START = "ChildrenStart"
"""The condition reason until all parts of the job have served once."""


class Stage(StrEnum):
    STARTING = "Starting"
    """The children are being created; the head, the sidecars and the feeders do not serve yet."""
    RUNNING = "Running"
    """The head, the sidecars and the feeders have served, and the trainers train."""
    RESTARTING = "Restarting"
    """A trainer failed; all trainers are being recreated in a new attempt."""
    WAITING = "Waiting"
    """No pod is attached; the head and the feeders start or serve."""
    SERVING = "Serving"
    """Pods are attached, and the head, the sidecars and the feeders have served."""
    IDLE = "Idle"
    """No pod has been attached for a long time, so there are no feeders."""
    SUSPENDING = "Suspending"
    """The job's pods are terminating."""
    SUSPENDED = "Suspended"
    """The job is suspended, and its last pod is gone."""
    COMPLETE = "Complete"
    """All trainers ended with exit code 0."""
    FAILED = "Failed"
    """The job ended without success, for example because a trainer failed or a deadline passed."""


class ChildPart(StrEnum):
    """Groups of children that are created and deleted together."""

    BASE = "base"
    FEEDING = "feeding"
    TRAINERS = "trainers"


ATTACHED = frozenset({Stage.WAITING, Stage.SERVING, Stage.IDLE})
"""Stages that only jobs with attached trainers have."""
AT_WORK = frozenset({Stage.RUNNING, *ATTACHED})
"""Stages in which the operator neither starts nor ends the job as a whole."""
MOVING = frozenset({Stage.STARTING, Stage.RESTARTING, Stage.SUSPENDING})
HELD = frozenset({Stage.SUSPENDING, Stage.SUSPENDED})
ENDED = frozenset({Stage.COMPLETE, Stage.FAILED})
WANTED: dict[Stage, frozenset[ChildPart]] = {
    stage: frozenset({ChildPart.BASE}) if stage in HELD | ENDED else frozenset(ChildPart) for stage in Stage
}


@dataclass(frozen=True, slots=True)
class StageResult:
    """The stage that a job is in, and why."""

    stage: Stage
    reason: str
    """The reason in CamelCase, as conditions require."""
    message: str = ""
    attempt: int = 0
    """The attempt to which the wanted trainers belong."""
    tally: Tally | None = None
    """The new restart counts; None if they are unchanged."""
    queue: ConditionState | None = None
    """The reason why the job is queued; None if it is not queued."""


def find_stage(
    observed: Observed, health: Health, found: Parts, queue: QueuedRole | None, now: datetime
) -> StageResult:
    """Finds the stage of a job by the first rule that applies."""
    attempt = observed.attempt
    for kind, stage in ((ConditionType.COMPLETE, Stage.COMPLETE), (ConditionType.FAILED, Stage.FAILED)):
        ended = observed.status.condition(kind)
        if ended is not None and ended.status == "True":
            return StageResult(stage, ended.reason, ended.message, attempt)
    if observed.job.spec.trainers.attached:
        return _attached_stage(observed, health, found, queue, now)
    trainers = observed.trainers()
    if trainers is Trainers.COMPLETE:
        return StageResult(
            Stage.COMPLETE, "TrainersSucceeded", "all trainers ended with exit code 0", attempt
        )
    if observed.job.spec.suspend:
        return _held(observed, attempt, now)
    if (late := _late(observed, health, queue, now) or _rejected(observed)) is not None:
        return late
    if trainers is Trainers.FAILED:
        return _failed(observed, health, now)
    if (restarting := _restarting(observed, attempt, now)) is not None:
        return restarting
    if _served(observed) or serves(found):
        waits = queue.why if queue is not None and queue.role is Role.TRAINER else None
        return StageResult(Stage.RUNNING, "Serving", "", attempt, queue=waits)
    if queue is not None:
        return StageResult(Stage.STARTING, "Queued", queue.why.message, attempt, queue=queue.why)
    return StageResult(Stage.STARTING, CHILDREN_START, "", attempt)


def _attached_stage(
    observed: Observed, health: Health, found: Parts, queue: QueuedRole | None, now: datetime
) -> StageResult:
    """Finds the stage of a job that has not ended and whose trainers other controllers create."""
    if (over := _followed_end(observed)) is not None:
        return over
    if observed.job.spec.suspend:
        return _held(observed, 0, now)
    if (late := _late(observed, health, queue, now) or _rejected(observed)) is not None:
        return late
    if attached.is_idle(observed, now):
        return StageResult(
            Stage.IDLE, "Idle", "no pod is attached; the feeders start when the next one attaches"
        )
    serving = serves(found, attaches=True)
    waits = queue.why if queue is not None and not serving else None
    there = attached.pods(observed)
    if not there:
        reason = "Waiting" if serving or _served(observed) else CHILDREN_START
        return StageResult(Stage.WAITING, reason, "no pod is attached", queue=waits)
    if serving and not attached.listening(observed):
        return StageResult(Stage.WAITING, "Waiting", f"{len(there)} attached pods are starting")
    if _served(observed) or serving:
        return StageResult(Stage.SERVING, "Serving", "", queue=waits)
    if waits is not None:
        return StageResult(Stage.STARTING, "Queued", waits.message, queue=waits)
    return StageResult(Stage.STARTING, CHILDREN_START, "")


def _followed_end(observed: Observed) -> StageResult | None:
    """Returns the job's final stage if the followed object has ended; None otherwise."""
    spec, found = observed.job.spec.trainers.attach, observed.followed
    if spec is None or spec.follow is None or found is None:
        return None
    if found.state is FollowedState.COMPLETE:
        return StageResult(Stage.COMPLETE, "FollowedCompleted", f"{spec.follow} completed: {found.text}")
    if found.state is FollowedState.FAILED:
        return StageResult(Stage.FAILED, "FollowedFailed", f"{spec.follow} failed: {found.text}")
    if found.state is FollowedState.MISSING and observed.status.trainers.followed_uid:
        text = f"{spec.follow} was deleted before it completed"
        return StageResult(Stage.FAILED, "FollowedDeleted", text)
    return None


def _held(observed: Observed, attempt: int, now: datetime) -> StageResult:
    gone = restarts.stuck(observed, now)
    if len(gone) < len(observed.pods):
        return StageResult(
            Stage.SUSPENDING, "PodsLeave", f"{len(observed.pods)} pods are terminating", attempt
        )
    text = f"spec.suspend is true; {restarts.describe_stuck(gone)}" if gone else "spec.suspend is true"
    return StageResult(Stage.SUSPENDED, "AskedFor", text, attempt)


def _restarting(observed: Observed, attempt: int, now: datetime) -> StageResult | None:
    """Returns the result for a job that pauses before an attempt. If the current attempt's Job cannot be deleted,
    returns the result that starts a new attempt. Returns None if neither applies."""
    if restarts.waits_until(observed, now) is not None:
        why = observed.status.condition(ConditionType.PROGRESSING)
        reason, message = ("TrainerFailed", "") if why is None else (why.reason, why.message)
        return StageResult(Stage.RESTARTING, reason, message, attempt)
    if restarts.own_name_is_held(observed, now):
        return StageResult(Stage.RESTARTING, "PodsStuck", restarts.describe_holder(observed), attempt + 1)
    return None


def _late(observed: Observed, health: Health, queue: QueuedRole | None, now: datetime) -> StageResult | None:
    """Returns the result if a deadline has passed; None if none has. The startup deadline counts from the time at which
    all needed pods had a node."""
    if observed.status.start_time is None:
        return None
    elapsed = now - parse_time(observed.status.start_time)
    startup, active = observed.job.spec.startup_deadline_seconds, observed.job.spec.active_deadline_seconds
    if active is not None and elapsed >= timedelta(seconds=active):
        return StageResult(
            Stage.FAILED, "DeadlineExceeded",
            f"the job ran longer than activeDeadlineSeconds {active}", observed.attempt,
        )  # fmt: skip
    scheduled = None if queue is not None else observed.status.scheduled_time
    late = scheduled is not None and now - parse_time(scheduled) >= timedelta(seconds=startup)
    if late and not _served(observed) and not _up(observed, health):
        trouble, supervisor = health.trouble or health.event_trouble, observed.supervisor
        cause = ""
        if supervisor is not None:
            cause = observed.describe(supervisor.cause) if supervisor.cause is not None else supervisor.silent
        cause = observed.refused or cause
        why = f": {trouble or cause}" if trouble or cause else ""
        return StageResult(
            Stage.FAILED, "StartupDeadlineExceeded",
            f"the job did not start within startupDeadlineSeconds {startup}{why}", observed.attempt,
        )  # fmt: skip
    return None


def _rejected(observed: Observed) -> StageResult | None:
    """Returns the failure of a job that cannot use its existing Ray cluster because their versions differ. Returns None
    if the versions match, or the job has served already."""
    text = "" if _served(observed) else external.refusal(observed)
    return StageResult(Stage.FAILED, external.DIFFERS, text, observed.attempt) if text else None


def _failed(observed: Observed, health: Health, now: datetime) -> StageResult:
    """Returns the result after a trainer has failed. By the failure policy, all trainers restart or the job fails."""
    failure, attempt = restarts.judge(observed, health, now), observed.attempt
    if failure.kind is FailureKind.UNKNOWN:
        return StageResult(Stage.RESTARTING, "TrainerFailed", failure.cause, attempt)
    if failure.kind is FailureKind.FATAL:
        return StageResult(Stage.FAILED, "FailurePolicy", failure.cause, attempt)
    before, most = restarts.tally_of(observed), observed.job.spec.trainers.own.failure_policy.max_restarts
    if failure.kind is FailureKind.COUNTED and before.failures >= most:
        return StageResult(
            Stage.FAILED,
            "MaxRestartsExceeded",
            f"{failure.cause} (failurePolicy.maxRestarts {most})",
            attempt,
        )
    if failure.kind is FailureKind.IGNORED and before.disruptions >= restarts.MAX_DISRUPTIONS:
        many = f"{before.disruptions} consecutive disruptions without progress"
        return StageResult(Stage.FAILED, "DisruptedTooOften", f"{failure.cause} ({many})", attempt)
    tally = restarts.counted(observed, failure.kind, now)
    reason, how = "TrainerFailed", f"restart {tally.failures} of {most}"
    if failure.kind is FailureKind.IGNORED:
        reason, how = (
            "Disrupted",
            f"restart not counted as a failure ({_ordinal(tally.disruptions)} consecutive disruption)",
        )
    when = f", at {tally.next_start}" if tally.next_start else ""
    return StageResult(Stage.RESTARTING, reason, f"{failure.cause}; {how}{when}", attempt + 1, tally)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number not in {11, 12, 13} else "th"
    return f"{number}{ending}"


def _served(observed: Observed) -> bool:
    """Returns True if the job has met its startup deadline since it started or was resumed: all parts have served, or
    the trainers were restarted."""
    # Statuses written by earlier versions of the operator lack this time.
    return observed.status.serving_time is not None or observed.status.phase in {
        Phase.RUNNING,
        Phase.DEGRADED,
    }


def _up(observed: Observed, health: Health) -> bool:
    """Returns True if the job has started up. If the supervisor does not answer, only the pods count: an operator that
    cannot reach the supervisor must not end a job that may be training."""
    answered = observed.supervisor is not None and not observed.supervisor.silent
    own = () if observed.job.spec.trainers.attached else (health.sidecars, health.trainer_pods)
    return all(pods.holds for pods in (health.head_pods, health.feeder_pods, *own)) and (
        not answered or observed.serving() >= observed.job.spec.feeders.min_available
    )
