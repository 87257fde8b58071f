"""The conditions of a job, from what was seen. Pure: times come in, and stay while a condition's status does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from dataloaderjob.api.status import Condition, ConditionType, DataLoaderJobStatus
from dataloaderjob.core.supervision import LASTING
from dataloaderjob_operator import names, texts
from dataloaderjob_operator.decide import event_causes, troubles
from dataloaderjob_operator.decide.observed import Observed, condition_of, show_time
from dataloaderjob_operator.decide.stage import Stage, StageResult
from dataloaderjob_operator.objects.workloads import SIDECAR

ENDED = frozenset({Stage.COMPLETE, Stage.FAILED})
HELD = frozenset({Stage.SUSPENDING, Stage.SUSPENDED})
STARTS = frozenset({"NotMade", "PodsStart", "SupervisorStarts", "RayStarts", "FeedersStart", "FeederStarts"})
"""Reasons that are no cause for worry yet."""
MAX_MESSAGE = 4096
"""Characters, as the CRD has it."""
MOVING = frozenset({Stage.STARTING, Stage.RESTARTING, Stage.SUSPENDING})


@dataclass(frozen=True, slots=True)
class ConditionState:
    """A condition without its times."""

    holds: bool | None
    """None: not known."""
    reason: str
    message: str = ""

    @property
    def status(self) -> Literal["True", "False", "Unknown"]:
        if self.holds is None:
            return "Unknown"
        return "True" if self.holds else "False"


Parts = Mapping[ConditionType, ConditionState]
"""HeadReady, FeedersReady, SidecarsReady and TrainersReady."""


def parts(observed: Observed) -> Parts:
    """Whether head, feeders and sidecars serve and trainers run, each with the pod that does not and why."""
    spec = observed.job.spec
    return {
        ConditionType.HEAD_READY: _head(observed),
        ConditionType.FEEDERS_READY: _feeders(observed, spec.feeders.min_replicas),
        ConditionType.SIDECARS_READY: _trainer_pods(observed, _sidecar_listens, "sidecars listen"),
        ConditionType.TRAINERS_READY: _trainer_pods(observed, _trains, "trainer pods run"),
    }


def serves(found: Parts) -> bool:
    return all(fact.holds for fact in found.values())


def up(observed: Observed, found: Parts) -> bool:
    """Whether the job has come up, as far as pods show it: an operator that does not hear a supervisor ends no job that
    may well train."""
    spec = observed.job.spec
    heard = observed.answer is not None and not observed.answer.silent
    return (
        bool(_deployment(observed, names.head(observed.job.name), names.Role.HEAD, 1).holds)
        and bool(_feeder_pods(observed, spec.feeders.min_replicas).holds)
        and (not heard or observed.serving() >= spec.feeders.min_replicas)
        and bool(found[ConditionType.SIDECARS_READY].holds and found[ConditionType.TRAINERS_READY].holds)
    )


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


def _head(observed: Observed) -> ConditionState:
    """Its pod is ready, and the supervisor in it answers and has Ray."""
    fact, answer = _deployment(observed, names.head(observed.job.name), names.Role.HEAD, 1), observed.answer
    if not fact.holds:
        return fact
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


def _feeders(observed: Observed, needed: int) -> ConditionState:
    """The supervisor has as many feeders as that many pods have, and no trainer is stuck at a failure of theirs."""
    answer = observed.answer
    pods, serving = _feeder_pods(observed, needed), observed.serving()
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


def _feeder_pods(observed: Observed, needed: int) -> ConditionState:
    return _deployment(observed, names.feeders(observed.job.name), names.Role.FEEDER, needed)


def _deployment(observed: Observed, name: str, role: names.Role, needed: int) -> ConditionState:
    live = observed.children.get(("Deployment", name))
    if live is None:
        return ConditionState(None, "NotMade", f"Deployment {name} is not there yet")
    ready = int(live.get("status", {}).get("readyReplicas") or 0)
    count = f"{role.value} pods ready: {ready}, needed: {needed}"
    if ready >= needed:
        return ConditionState(True, "Serving", f"{role.value} pods ready: {needed} or more")
    if (trouble := troubles.first(observed.of_role(role)) or event_causes.told(observed, role)) is not None:
        return ConditionState(False, trouble.reason, str(trouble))
    refused = condition_of(live, "ReplicaFailure")
    if refused is not None and refused["status"] == "True":
        return ConditionState(False, refused.get("reason") or "PodsRefused", refused.get("message", ""))
    return ConditionState(False, "PodsStart", count)


def _trainer_pods(observed: Observed, does: Callable[[Mapping[str, Any]], bool], what: str) -> ConditionState:
    """Whether as many trainer pods do it as there shall be."""
    pods, needed = observed.of_role(names.Role.TRAINER), observed.job.spec.trainer.replicas
    found = sum(does(pod.get("status") or {}) for pod in pods) + _succeeded_and_gone(observed, pods)
    if found >= needed:
        return ConditionState(True, "Serving", f"{found} of {needed} {what}")
    if (trouble := troubles.first(pods) or event_causes.told(observed, names.Role.TRAINER)) is not None:
        return ConditionState(False, trouble.reason, str(trouble))
    return ConditionState(False, "PodsStart", f"{found} of {needed} {what}")


def _succeeded_and_gone(observed: Observed, pods: Sequence[Mapping[str, Any]]) -> int:
    """Trainers that ended well and whose pods somebody has removed since."""
    live: Mapping[str, Any] = observed.children.get(
        ("Job", names.trainers(observed.job.name, observed.attempt)), {}
    )
    ended = int(live.get("status", {}).get("succeeded") or 0)
    there: int = sum((pod.get("status") or {}).get("phase") == "Succeeded" for pod in pods)
    return max(0, ended - there)


def _sidecar_listens(status: Mapping[str, Any]) -> bool:
    """Its container has started, then its socket listens; or nobody needs it any more."""
    containers = status.get("initContainerStatuses") or ()
    return _ended_well(status) or any(
        container.get("name") == SIDECAR and container.get("started") for container in containers
    )


def _ended_well(status: Mapping[str, Any]) -> bool:
    """All its containers have; the pod's phase says so a little later."""
    codes = [
        c.get("state", {}).get("terminated", {}).get("exitCode")
        for c in status.get("containerStatuses") or ()
    ]
    return status.get("phase") == "Succeeded" or (bool(codes) and all(code == 0 for code in codes))


def _trains(status: Mapping[str, Any]) -> bool:
    states = [container.get("state", {}) for container in status.get("containerStatuses") or ()]
    return status.get("phase") in {"Running", "Succeeded"} and all(
        "running" in state or state.get("terminated", {}).get("exitCode") == 0 for state in states
    )
