"""The conditions of a job, from what was seen. Pure: times come in, and stay while a condition's status does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from dataloaderjob.api.status import Condition, ConditionType, DataLoaderJobStatus
from dataloaderjob.core.supervision import LASTING
from dataloaderjob_operator import texts
from dataloaderjob_operator.decide.health import ConditionState, Health
from dataloaderjob_operator.decide.observed import Observed, show_time
from dataloaderjob_operator.decide.stage import Stage, StageResult

ENDED = frozenset({Stage.COMPLETE, Stage.FAILED})
HELD = frozenset({Stage.SUSPENDING, Stage.SUSPENDED})
STARTS = frozenset({"NotMade", "PodsStart", "SupervisorStarts", "RayStarts", "FeedersStart", "FeederStarts"})
"""Reasons that are no cause for worry yet."""
MAX_MESSAGE = 4096
"""Characters, as the CRD has it."""
MOVING = frozenset({Stage.STARTING, Stage.RESTARTING, Stage.SUSPENDING})


Parts = Mapping[ConditionType, ConditionState]
"""HeadReady, FeedersReady, SidecarsReady and TrainersReady."""


def parts(observed: Observed, health: Health) -> Parts:
    """Whether head, feeders and sidecars serve and trainers run, each with the pod that does not and why."""
    return {
        ConditionType.HEAD_READY: _head(observed, health.head_pods),
        ConditionType.FEEDERS_READY: _feeders(observed, health.feeder_pods),
        ConditionType.SIDECARS_READY: health.sidecars,
        ConditionType.TRAINERS_READY: health.trainer_pods,
    }


def serves(found: Parts) -> bool:
    return all(fact.holds for fact in found.values())


def up(observed: Observed, health: Health) -> bool:
    """Whether the job has come up, as far as pods show it: an operator that no supervisor answers ends no job that may
    well train."""
    answered = observed.answer is not None and not observed.answer.silent
    return all(
        pods.holds for pods in (health.head_pods, health.feeder_pods, health.sidecars, health.trainer_pods)
    ) and (not answered or observed.serving() >= observed.job.spec.feeders.min_replicas)


def conditions(observed: Observed, where: StageResult, found: Parts, now: datetime) -> tuple[Condition, ...]:
    """All of them, in the order of `ConditionType`."""
    return tuple(
        _condition(observed.status, kind, fact, observed.generation, now, unsaid=observed.unsaid)
        for kind, fact in _all(where, found, observed.refused)
    )


def not_ready(
    before: DataLoaderJobStatus,
    why: ConditionState,
    generation: int,
    now: datetime,
    *,
    unsaid: frozenset[str],
) -> DataLoaderJobStatus:
    """The status of a job about which nothing else can be said anew."""
    made = _condition(before, ConditionType.READY, why, generation, now, unsaid=unsaid)
    others = (condition for condition in before.conditions if condition.type != ConditionType.READY)
    return before.model_copy(update={"conditions": (made, *others)})


def unsaid(status: DataLoaderJobStatus) -> tuple[DataLoaderJobStatus, frozenset[str]]:
    """The status without its messages, and those."""
    messages = frozenset(c.message for c in status.conditions) - {"", texts.UNSAID}
    told = tuple(c.model_copy(update={"message": c.message and texts.UNSAID}) for c in status.conditions)
    return status.model_copy(update={"conditions": told}), messages


def _condition(
    before: DataLoaderJobStatus, kind: ConditionType, fact: ConditionState, generation: int, now: datetime, *,
    unsaid: frozenset[str],
) -> Condition:  # fmt: skip
    """Whatever text it is from, the API server and a terminal take it."""
    old, message = before.condition(kind), texts.shown(fact.message, MAX_MESSAGE)
    return Condition(
        type=kind, status=fact.status, reason=texts.reason(fact.reason),
        message=texts.UNSAID if message in unsaid else message, observed_generation=generation,
        last_transition_time=old.last_transition_time if old and old.status == fact.status else show_time(now),
    )  # fmt: skip


def _all(where: StageResult, found: Parts, refused: str) -> Iterator[tuple[ConditionType, ConditionState]]:
    stage = where.stage
    if stage in ENDED or stage in HELD:
        gone = ConditionState(False, stage.value, "its pods are released")
        found = dict.fromkeys(found, gone)
    yield (
        ConditionType.READY,
        ConditionState(False, "ChildRefused", refused) if refused else _ready(where, found),
    )
    yield from found.items()
    why = ConditionState(stage in MOVING, where.reason, where.message)
    yield ConditionType.PROGRESSING, why if stage in MOVING or stage in ENDED else _moves(stage, found)
    for kind, at in (
        (ConditionType.SUSPENDED, Stage.SUSPENDED),
        (ConditionType.COMPLETE, Stage.COMPLETE),
        (ConditionType.FAILED, Stage.FAILED),
    ):
        yield (
            kind,
            ConditionState(True, where.reason, where.message)
            if stage is at
            else ConditionState(False, f"Not{kind.value}"),
        )


def _ready(where: StageResult, found: Parts) -> ConditionState:
    if where.stage in ENDED or where.stage in HELD:
        return ConditionState(False, where.stage.value, where.message)
    lacking = [fact for fact in found.values() if not fact.holds]
    if lacking:  # what is wrong before what merely takes its time
        first = min(lacking, key=lambda fact: fact.reason in STARTS)
        return ConditionState(False, first.reason, first.message)
    return ConditionState(True, "Serving", "head, sidecars and feeders serve, trainers run")


def _moves(stage: Stage, found: Parts) -> ConditionState:
    """A job that runs is where it shall be, unless a part of it is on its way back."""
    if stage is Stage.RUNNING and not serves(found):
        return ConditionState(True, "Recovering", next(f.message for f in found.values() if not f.holds))
    return ConditionState(False, "AsAskedFor")


def _head(observed: Observed, pods: ConditionState) -> ConditionState:
    """Its pod is ready, and the supervisor in it answers and has Ray."""
    answer = observed.answer
    if not pods.holds:
        return pods
    if answer is None:  # this operator has just started, or the head has
        before = observed.status.condition(ConditionType.HEAD_READY)
        if before is not None and before.status == "True":
            return ConditionState(True, before.reason, before.message)
        return ConditionState(
            False, "SupervisorStarts", "its pod is ready, its supervisor has not been heard yet"
        )
    if answer.silent:
        return ConditionState(
            False, "SupervisorSilent", f"the supervisor in its pod does not answer: {answer.silent}"
        )
    if not answer.ray.version:
        return ConditionState(False, "RayStarts", "Ray has not answered the supervisor in its pod yet")
    return ConditionState(True, "Serving", "Ray and the supervisor answer")


def _feeders(observed: Observed, pods: ConditionState) -> ConditionState:
    """The supervisor has as many feeders as the pods that are needed have, and no trainer is stuck at a failure of
    theirs."""
    answer, serving, needed = observed.answer, observed.serving(), observed.job.spec.feeders.min_replicas
    if pods.holds is None:
        return pods
    if answer is not None and answer.failure is not None:
        return ConditionState(False, answer.failure.reason, observed.told(answer.failure))
    count = f"feeder pods that serve: {serving}, needed: {needed}"
    if serving >= needed:
        return ConditionState(True, "Serving", f"feeder pods that serve: {needed} or more")
    if not pods.holds and pods.reason != "PodsStart":
        return pods
    cause = None if answer is None else answer.cause
    if cause is not None and (pods.holds or cause.reason in LASTING):
        return ConditionState(False, cause.reason, f"{count}; {observed.told(cause)}")
    return ConditionState(False, "FeedersStart", count) if pods.holds else pods
