"""The conditions of a job, from its health. Pure: times come in, and stay while a condition's status does."""

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
    """The states of head, feeders, sidecars and trainers, each with the pod that does not work and why."""
    return {
        ConditionType.HEAD_READY: _head(observed, health.head_pods),
        ConditionType.FEEDERS_READY: _feeders(observed, health.feeder_pods),
        ConditionType.SIDECARS_READY: health.sidecars,
        ConditionType.TRAINERS_READY: health.trainer_pods,
    }


def serves(found: Parts) -> bool:
    return all(state.holds for state in found.values())


def up(observed: Observed, health: Health) -> bool:
    """Checks whether the job has come up, as far as pods show: an operator that no supervisor answers ends no job that
    may well train."""
    answered = observed.supervisor is not None and not observed.supervisor.silent
    return all(
        pods.holds for pods in (health.head_pods, health.feeder_pods, health.sidecars, health.trainer_pods)
    ) and (not answered or observed.serving() >= observed.job.spec.feeders.min_replicas)


def conditions(observed: Observed, result: StageResult, found: Parts, now: datetime) -> tuple[Condition, ...]:
    """Makes all conditions, in the order of `ConditionType`."""
    return tuple(
        _condition(
            observed.status, kind, state, observed.generation, now, refused_texts=observed.refused_texts
        )
        for kind, state in _all(result, found, observed.refused)
    )


def not_ready(
    before: DataLoaderJobStatus,
    why: ConditionState,
    generation: int,
    now: datetime,
    *,
    refused_texts: frozenset[str],
) -> DataLoaderJobStatus:
    """The status of a job of which only this is known anew: why it is not ready."""
    made = _condition(before, ConditionType.READY, why, generation, now, refused_texts=refused_texts)
    others = (condition for condition in before.conditions if condition.type != ConditionType.READY)
    return before.model_copy(update={"conditions": (made, *others)})


def without_messages(status: DataLoaderJobStatus) -> tuple[DataLoaderJobStatus, frozenset[str]]:
    """Takes the messages out of a status; returns both."""
    messages = frozenset(c.message for c in status.conditions) - {"", texts.WITHHELD}
    bare = tuple(c.model_copy(update={"message": c.message and texts.WITHHELD}) for c in status.conditions)
    return status.model_copy(update={"conditions": bare}), messages


def _condition(
    before: DataLoaderJobStatus, kind: ConditionType, state: ConditionState, generation: int, now: datetime, *,
    refused_texts: frozenset[str],
) -> Condition:  # fmt: skip
    """Makes one condition. Its text is one that the API server and a terminal take, whatever it is from."""
    old, message = before.condition(kind), texts.shown(state.message, MAX_MESSAGE)
    return Condition(
        type=kind, status=state.status, reason=texts.reason(state.reason),
        message=texts.WITHHELD if message in refused_texts else message, observed_generation=generation,
        last_transition_time=old.last_transition_time if old and old.status == state.status else show_time(now),
    )  # fmt: skip


def _all(result: StageResult, found: Parts, refused: str) -> Iterator[tuple[ConditionType, ConditionState]]:
    stage = result.stage
    if stage in ENDED or stage in HELD:
        gone = ConditionState(False, stage.value, "its pods are released")
        found = dict.fromkeys(found, gone)
    yield (
        ConditionType.READY,
        ConditionState(False, "ChildRefused", refused) if refused else _ready(result, found),
    )
    yield from found.items()
    why = ConditionState(stage in MOVING, result.reason, result.message)
    yield ConditionType.PROGRESSING, why if stage in MOVING or stage in ENDED else _moves(stage, found)
    for kind, at in (
        (ConditionType.SUSPENDED, Stage.SUSPENDED),
        (ConditionType.COMPLETE, Stage.COMPLETE),
        (ConditionType.FAILED, Stage.FAILED),
    ):
        yield (
            kind,
            ConditionState(True, result.reason, result.message)
            if stage is at
            else ConditionState(False, f"Not{kind.value}"),
        )


def _ready(result: StageResult, found: Parts) -> ConditionState:
    if result.stage in ENDED or result.stage in HELD:
        return ConditionState(False, result.stage.value, result.message)
    lacking = [state for state in found.values() if not state.holds]
    if lacking:  # what is wrong before what merely takes its time
        first = min(lacking, key=lambda state: state.reason in STARTS)
        return ConditionState(False, first.reason, first.message)
    return ConditionState(True, "Serving", "head, sidecars and feeders serve, trainers run")


def _moves(stage: Stage, found: Parts) -> ConditionState:
    """A job that runs makes no progress, unless a part of it is on its way back."""
    if stage is Stage.RUNNING and not serves(found):
        return ConditionState(True, "Recovering", next(f.message for f in found.values() if not f.holds))
    return ConditionState(False, "AsAskedFor")


def _head(observed: Observed, pods: ConditionState) -> ConditionState:
    """The head serves when its pod is ready and the supervisor in it answers and has Ray."""
    supervisor = observed.supervisor
    if not pods.holds:
        return pods
    if supervisor is None:  # this operator has just started, or the head has
        before = observed.status.condition(ConditionType.HEAD_READY)
        if before is not None and before.status == "True":
            return ConditionState(True, before.reason, before.message)
        return ConditionState(
            False, "SupervisorStarts", "its pod is ready, its supervisor has not reported yet"
        )
    if supervisor.silent:
        return ConditionState(
            False, "SupervisorSilent", f"the supervisor in its pod does not answer: {supervisor.silent}"
        )
    if not supervisor.ray.version:
        return ConditionState(False, "RayStarts", "Ray has not answered the supervisor in its pod yet")
    return ConditionState(True, "Serving", "Ray and the supervisor answer")


def _feeders(observed: Observed, pods: ConditionState) -> ConditionState:
    """Feeders serve when the supervisor has as many as the pods that are needed have, and no trainer is stuck at a
    failure of theirs."""
    supervisor, serving, needed = (
        observed.supervisor,
        observed.serving(),
        observed.job.spec.feeders.min_replicas,
    )
    if pods.holds is None:
        return pods
    if supervisor is not None and supervisor.failure is not None:
        return ConditionState(False, supervisor.failure.reason, observed.describe(supervisor.failure))
    count = f"feeder pods that serve: {serving}, needed: {needed}"
    if serving >= needed:
        return ConditionState(True, "Serving", f"feeder pods that serve: {needed} or more")
    if not pods.holds and pods.reason != "PodsStart":
        return pods
    cause = None if supervisor is None else supervisor.cause
    if cause is not None and (pods.holds or cause.reason in LASTING):
        return ConditionState(False, cause.reason, f"{count}; {observed.describe(cause)}")
    return ConditionState(False, "FeedersStart", count) if pods.holds else pods
