"""A job's stage, the job's children in that stage, and the conditions that follow from the job's health. Pure: callers
pass the time, and a condition keeps its transition time while its status stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from dataloaderjob.api.status import Condition, ConditionType, DataLoaderJobStatus, Phase
from dataloaderjob.core.supervision import LASTING
from dataloaderjob.core.texts import clean
from dataloaderjob_operator.decide import attached, restarts
from dataloaderjob_operator.decide.followed import FollowedState
from dataloaderjob_operator.decide.health import WAITS, ConditionState, Health
from dataloaderjob_operator.decide.observed import (
    Observed,
    Trainers,
    parse_time,
    show_time,
)
from dataloaderjob_operator.decide.queueing import Queue
from dataloaderjob_operator.decide.restarts import FailureKind, Tally
from dataloaderjob_operator.names import Role

STARTS = frozenset(
    {
        "NotMade",
        "PodsStart",
        "PodsLeave",
        "SupervisorStarts",
        "RayStarts",
        "FeedersStart",
        "FeederStarts",
        WAITS,
    }
)
"""Reasons of parts that are still starting, which are no cause for concern."""
CHILDREN_START = "ChildrenStart"
"""The reason until all parts of the job have served once."""
FAULTS = frozenset({"InvalidSpec", "NotUnderstood"})
"""Reasons that persist until the job's spec changes."""
MAX_MESSAGE = 4096
"""Maximum number of characters of a message, as in the CRD."""
WITHHELD = "the API server refused the text of this condition: see the operator's log"
"""Replacement for a message that made the API server refuse a status."""
_NOT_IN_REASONS = re.compile("[^A-Za-z0-9]+")


class Stage(StrEnum):
    STARTING = "Starting"
    """The children are being created; head, sidecars and feeders do not serve yet."""
    RUNNING = "Running"
    """Head, sidecars and feeders have served; the trainers train."""
    RESTARTING = "Restarting"
    """A trainer failed; all trainers are being recreated in a new attempt."""
    WAITING = "Waiting"
    """No pod is attached; head and feeders start or serve."""
    SERVING = "Serving"
    """Pods are attached, and head, sidecars and feeders have served."""
    IDLE = "Idle"
    """No pod has been attached for long, so there are no feeders."""
    SUSPENDING = "Suspending"
    """The job's pods are terminating."""
    SUSPENDED = "Suspended"
    """No pod is left."""
    COMPLETE = "Complete"
    """All trainers ended with exit code 0."""
    FAILED = "Failed"
    """The job ended in any other way."""


class ChildPart(StrEnum):
    """Groups of children that are created and deleted together."""

    BASE = "base"
    FEEDING = "feeding"
    TRAINERS = "trainers"


ATTACHED = frozenset({Stage.WAITING, Stage.SERVING, Stage.IDLE})
"""Stages that only a job with attached trainers has, besides those that all jobs have."""
AT_WORK = frozenset({Stage.RUNNING, *ATTACHED})
"""Stages in which nothing is being started or ended on purpose."""
MOVING = frozenset({Stage.STARTING, Stage.RESTARTING, Stage.SUSPENDING})
HELD = frozenset({Stage.SUSPENDING, Stage.SUSPENDED})
ENDED = frozenset({Stage.COMPLETE, Stage.FAILED})
WANTED: dict[Stage, frozenset[ChildPart]] = {
    stage: frozenset({ChildPart.BASE}) if stage in HELD | ENDED else frozenset(ChildPart) for stage in Stage
}
Parts = Mapping[ConditionType, ConditionState]
"""HeadReady, FeedersReady, SidecarsReady and TrainersReady."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """The stage that a job is in, and why."""

    stage: Stage
    reason: str
    """CamelCase, for the condition."""
    message: str = ""
    attempt: int = 0
    """The attempt that the wanted trainers belong to."""
    tally: Tally | None = None
    """The new restart counts; None: unchanged."""
    queue: ConditionState | None = None
    """The reason why the job is queued; None: it is not queued."""


def find_stage(
    observed: Observed, health: Health, found: Parts, queue: Queue | None, now: datetime
) -> StageResult:
    """Finds the stage by the first rule that applies."""
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
    if (late := _late(observed, health, queue, now)) is not None:
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
    observed: Observed, health: Health, found: Parts, queue: Queue | None, now: datetime
) -> StageResult:
    """Finds the stage of a job that has not ended and whose trainers other controllers create."""
    if (over := _followed_end(observed)) is not None:
        return over
    if observed.job.spec.suspend:
        return _held(observed, 0, now)
    if (late := _late(observed, health, queue, now)) is not None:
        return late
    if attached.is_idle(observed, now):
        return StageResult(Stage.IDLE, "Idle", "no pod is attached; the next one starts the feeders")
    serving = serves(found, attaches=True)
    waits = queue.why if queue is not None and not serving else None
    there = attached.pods(observed)
    if not there:
        reason = "Waiting" if serving or _served(observed) else CHILDREN_START
        return StageResult(Stage.WAITING, reason, "no pod is attached", queue=waits)
    if serving and not attached.listening(observed):
        return StageResult(Stage.WAITING, "Waiting", f"{len(there)} attached pods start")
    if _served(observed) or serving:
        return StageResult(Stage.SERVING, "Serving", "", queue=waits)
    if waits is not None:
        return StageResult(Stage.STARTING, "Queued", waits.message, queue=waits)
    return StageResult(Stage.STARTING, CHILDREN_START, "")


def _followed_end(observed: Observed) -> StageResult | None:
    """Returns the end of the job because of the object that it follows; None if that has not ended."""
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
    """Returns the pause before an attempt, or a new attempt because the name of the current attempt's Job is still in
    use; None if neither applies."""
    if restarts.waits_until(observed, now) is not None:
        why = observed.status.condition(ConditionType.PROGRESSING)
        reason, message = ("TrainerFailed", "") if why is None else (why.reason, why.message)
        return StageResult(Stage.RESTARTING, reason, message, attempt)
    if restarts.own_name_is_held(observed, now):
        return StageResult(Stage.RESTARTING, "PodsStuck", restarts.describe_holder(observed), attempt + 1)
    return None


def _late(observed: Observed, health: Health, queue: Queue | None, now: datetime) -> StageResult | None:
    """Checks the deadlines; returns None if none has passed. The startup deadline counts from the time at which all
    needed pods had a node."""
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
            f"the job was not up within startupDeadlineSeconds {startup}{why}", observed.attempt,
        )  # fmt: skip
    return None


def _failed(observed: Observed, health: Health, now: datetime) -> StageResult:
    """Restarts all trainers after one has failed, or fails the job, as the failure policy requires."""
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
    """Checks whether the startup deadline has been met since the job started or was resumed: all parts have served, or
    the trainers were restarted."""
    # Statuses of earlier operators have no such time.
    return observed.status.serving_time is not None or observed.status.phase in {
        Phase.RUNNING,
        Phase.DEGRADED,
    }


def _up(observed: Observed, health: Health) -> bool:
    """Checks whether the job has started up. If the supervisor does not answer, the pods alone decide: an operator that
    reaches no supervisor must not end a job that may be training."""
    answered = observed.supervisor is not None and not observed.supervisor.silent
    own = () if observed.job.spec.trainers.attached else (health.sidecars, health.trainer_pods)
    return all(pods.holds for pods in (health.head_pods, health.feeder_pods, *own)) and (
        not answered or observed.serving() >= observed.job.spec.feeders.min_available
    )


def parts(observed: Observed, health: Health) -> Parts:
    """Returns the states of head, feeders, sidecars and trainers, each with the failing pod and the cause."""
    return {
        ConditionType.HEAD_READY: _head(observed, health.head_pods),
        ConditionType.FEEDERS_READY: _feeders(observed, health.feeder_pods),
        ConditionType.SIDECARS_READY: health.sidecars,
        ConditionType.TRAINERS_READY: health.trainer_pods,
    }


def serves(found: Parts, *, attaches: bool = False) -> bool:
    """Checks whether all parts serve. `attaches`: other controllers create the trainers' pods."""
    return not _lacking(found, attaches=attaches)


def _lacking(found: Parts, *, attaches: bool) -> list[ConditionState]:
    """Returns the parts that do not serve. Attached pods that are starting are not lacking, and their own containers
    are the concern of their controllers."""

    def excused(kind: ConditionType, state: ConditionState) -> bool:
        starts = kind is ConditionType.SIDECARS_READY and state.reason in STARTS
        return attaches and (starts or kind is ConditionType.TRAINERS_READY)

    return [state for kind, state in found.items() if not state.holds and not excused(kind, state)]


def _head(observed: Observed, pods: ConditionState) -> ConditionState:
    """The head serves if its pod is ready and the supervisor in the pod answers and is connected to Ray."""
    supervisor = observed.supervisor
    if not pods.holds:
        return pods
    if supervisor is None:  # either this operator or the head has just started
        before = observed.status.condition(ConditionType.HEAD_READY)
        if before is not None and before.status == "True":
            return ConditionState(True, before.reason, before.message)
        return ConditionState(
            False, "SupervisorStarts", "its pod is ready, but its supervisor has not reported yet"
        )
    if supervisor.silent:
        return ConditionState(
            False,
            "SupervisorSilent",
            f"the supervisor in its pod does not answer: {supervisor.silent}"
            + ("; the pod is being replaced" if supervisor.hung else ""),
        )
    if not supervisor.ray.version:
        return ConditionState(False, "RayStarts", "Ray has not answered the supervisor in its pod yet")
    return ConditionState(True, "Serving", "Ray and the supervisor answer")


def _feeders(observed: Observed, pods: ConditionState) -> ConditionState:
    """Feeders serve if the supervisor reports enough of them for `minAvailable` pods and no trainer is stuck on an
    error from a feeder."""
    supervisor, serving = observed.supervisor, observed.serving()
    needed = observed.job.spec.feeders.min_available
    if pods.holds is None:
        return pods
    if supervisor is not None and supervisor.failure is not None:
        return ConditionState(False, supervisor.failure.reason, observed.describe(supervisor.failure))
    count = f"feeder pods serving: {serving}, needed: {needed}"
    if serving >= needed:
        return ConditionState(True, "Serving", f"feeder pods serving: {needed} or more")
    if not pods.holds and pods.reason != "PodsStart":
        return pods
    cause = None if supervisor is None else supervisor.cause
    if cause is not None and (pods.holds or cause.reason in LASTING):
        return ConditionState(False, cause.reason, f"{count}; {observed.describe(cause)}")
    return ConditionState(False, "FeedersStart", count) if pods.holds else pods


_TELLING = (
    (ConditionType.FAILED, "True"),
    (ConditionType.READY, "False"),
    (ConditionType.PROGRESSING, "True"),
)
"""Conditions, and for each the status with which it explains why a job is not as wanted; the first one counts."""
_SAID = frozenset(stage.value for stage in Stage)
"""Reasons that only repeat the phase."""


def conditions(
    observed: Observed, result: StageResult, found: Parts, short: ConditionState | None, now: datetime
) -> tuple[Condition, ...]:
    """Makes all conditions in the order of `ConditionType`."""
    return tuple(
        made_condition(
            observed.status, kind, state, observed.generation, now, refused_texts=observed.refused_texts
        )
        for kind, state in _all(
            result,
            found,
            _hindrance(observed),
            short or _left_behind(observed, now),
            attached.cannot_follow(observed),
            attaches=observed.job.spec.trainers.attached,
        )
    )


def reason_of(conditions: Iterable[Condition]) -> str:
    """Returns the reason why a job is not as wanted, from its conditions; empty if it is, or if the reason only repeats
    the phase."""
    found = {condition.type: condition for condition in conditions}
    for kind, bad in _TELLING:
        if kind in found and found[kind].status == bad:
            return "" if found[kind].reason in _SAID else found[kind].reason
    return ""


def not_ready(
    before: DataLoaderJobStatus,
    why: ConditionState,
    generation: int,
    now: datetime,
    *,
    refused_texts: frozenset[str],
) -> DataLoaderJobStatus:
    """Returns the status with only the reason for not being ready updated."""
    stalled = ConditionState(True, why.reason, why.message)
    made = [
        made_condition(before, kind, state, generation, now, refused_texts=refused_texts)
        for kind, state in ((ConditionType.READY, why), (ConditionType.STALLED, stalled))
    ]
    known = {condition.type: condition for condition in (*before.conditions, *made)}
    ordered = tuple(known[kind] for kind in ConditionType if kind in known)
    update = {"conditions": ordered, "reason": reason_of(ordered), "observed_generation": generation}
    return before.model_copy(update=update)


def reason_word(text: str, most: int = 128) -> str:
    """Turns text into one word, for a condition's reason."""
    return _NOT_IN_REASONS.sub("", text)[:most] or "Unknown"


def without_messages(status: DataLoaderJobStatus) -> tuple[DataLoaderJobStatus, frozenset[str]]:
    """Removes the messages from a status. Returns the status and the messages."""
    messages = frozenset(c.message for c in status.conditions) - {"", WITHHELD}
    bare = tuple(c.model_copy(update={"message": c.message and WITHHELD}) for c in status.conditions)
    return status.model_copy(update={"conditions": bare}), messages


def made_condition(
    before: DataLoaderJobStatus, kind: ConditionType, state: ConditionState, generation: int, now: datetime, *,
    refused_texts: frozenset[str],
) -> Condition:  # fmt: skip
    """Makes one condition. Its text is safe for the API server and for a terminal, whatever its source."""
    old, message = before.condition(kind), clean(state.message, MAX_MESSAGE)
    return Condition(
        type=kind, status=state.status, reason=reason_word(state.reason),
        message=WITHHELD if message in refused_texts else message, observed_generation=generation,
        last_transition_time=old.last_transition_time if old and old.status == state.status else show_time(now),
    )  # fmt: skip


def _left_behind(observed: Observed, now: datetime) -> ConditionState | None:
    """Returns the state for stuck pods, which the operator no longer waits for; None if there are none."""
    gone = restarts.stuck(observed, now)
    return ConditionState(False, "PodsStuck", restarts.describe_stuck(gone)) if gone else None


def _hindrance(observed: Observed) -> ConditionState | None:
    """Returns the obstacle to creating children; None if there is none."""
    if observed.not_understood:
        return ConditionState(False, "NotUnderstood", observed.not_understood)
    return ConditionState(False, "ChildRefused", observed.refused) if observed.refused else None


def _all(
    result: StageResult,
    found: Parts,
    hindrance: ConditionState | None,
    short: ConditionState | None,
    unread: ConditionState | None,
    *,
    attaches: bool,
) -> Iterator[tuple[ConditionType, ConditionState]]:
    stage = result.stage
    if stage in ENDED or stage in HELD:
        gone = ConditionState(False, stage.value, "its pods are released")
        found = dict.fromkeys(found, gone)
    ready = _ready(result, found, attaches=attaches) if hindrance is None or stage in ENDED else hindrance
    yield ConditionType.READY, ready
    yield from found.items()
    why = ConditionState(stage in MOVING, result.reason, result.message)
    if unread is not None and stage not in ENDED | HELD:  # nothing else would end the job
        why = unread
    elif stage not in MOVING | ENDED:
        why = _moves(result, found, short, attaches=attaches)
    yield ConditionType.PROGRESSING, why
    at_rest = ConditionState(True, result.reason, result.message)
    for kind in (ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED):
        yield kind, at_rest if stage.value == kind.value else ConditionState(False, f"Not{kind.value}")
    yield ConditionType.STALLED, _stalled(result, ready)


def _stalled(result: StageResult, ready: ConditionState) -> ConditionState:
    """A job is stalled, for tools that wait for it, if it failed or needs a change of its spec."""
    if result.stage is Stage.FAILED:
        return ConditionState(True, result.reason, result.message)
    if ready.reason in FAULTS:
        return ConditionState(True, ready.reason, ready.message)
    return ConditionState(False, "NotStalled")


def _ready(result: StageResult, found: Parts, *, attaches: bool) -> ConditionState:
    if result.stage is Stage.COMPLETE:
        return ConditionState(True, "Completed", result.message)
    if result.stage in ENDED or result.stage in HELD:
        return ConditionState(False, result.stage.value, result.message)
    lacking = _lacking(found, attaches=attaches)
    if lacking:  # a fault comes before a part that is merely starting
        first = min(lacking, key=lambda state: state.reason in STARTS)
        return ConditionState(False, first.reason, first.message)
    if result.stage in ATTACHED:
        pods = found[ConditionType.SIDECARS_READY].message
        text = result.message if result.stage is Stage.IDLE else f"head and feeders serve; {pods}"
        return ConditionState(True, result.reason, text)
    return ConditionState(True, "Serving", "head, sidecars and feeders serve, trainers run")


def _moves(
    result: StageResult, found: Parts, short: ConditionState | None, *, attaches: bool
) -> ConditionState:
    """A running job is progressing only while a part recovers, or wanted feeders are missing or being replaced."""
    running = result.stage in AT_WORK
    if running and result.queue is not None:
        return ConditionState(True, "Queued", result.queue.message)
    if running and (lacking := _lacking(found, attaches=attaches)):
        starts = result.reason == CHILDREN_START
        return ConditionState(True, CHILDREN_START if starts else "Recovering", lacking[0].message)
    if running and short is not None:
        return short
    return ConditionState(False, "AsAskedFor")
