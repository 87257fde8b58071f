"""The conditions of a job, from what was seen. Pure: times come in, and stay while a condition's status does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from dataloaderjob.api.status import Condition, ConditionType
from dataloaderjob_operator import names, troubles
from dataloaderjob_operator.objects.trainers import SIDECAR
from dataloaderjob_operator.seen import Seen, condition_of, show_time
from dataloaderjob_operator.stage import Stage, Where

ENDED = frozenset({Stage.COMPLETE, Stage.FAILED})
HELD = frozenset({Stage.SUSPENDING, Stage.SUSPENDED})
MOVING = frozenset({Stage.STARTING, Stage.RESTARTING, Stage.SUSPENDING})


@dataclass(frozen=True, slots=True)
class Fact:
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


Parts = Mapping[ConditionType, Fact]
"""HeadReady, FeedersReady and SidecarsReady."""


def parts(seen: Seen) -> Parts:
    """Whether head, feeders and sidecars serve, each with the pod that does not and why."""
    spec = seen.job.spec
    return {
        ConditionType.HEAD_READY: _deployment(seen, names.head(seen.job.name), names.Role.HEAD, 1),
        ConditionType.FEEDERS_READY: _deployment(
            seen, names.feeders(seen.job.name), names.Role.FEEDER, spec.feeders.min_replicas
        ),
        ConditionType.SIDECARS_READY: _sidecars(seen),
    }


def serves(found: Parts) -> bool:
    return all(fact.holds for fact in found.values())


def conditions(seen: Seen, where: Where, found: Parts, now: datetime) -> tuple[Condition, ...]:
    """All of them, in the order of `ConditionType`."""
    before = {condition.type: condition for condition in seen.status.conditions}
    made = []
    for kind, fact in _all(where, found, seen.refused):
        old = before.get(kind)
        since = old.last_transition_time if old and old.status == fact.status else show_time(now)
        made.append(
            Condition(
                type=kind, status=fact.status, reason=fact.reason, message=fact.message[:4096],
                observed_generation=seen.generation, last_transition_time=since,
            )
        )  # fmt: skip
    return tuple(made)


def _all(where: Where, found: Parts, refused: str) -> Iterator[tuple[ConditionType, Fact]]:
    stage = where.stage
    if stage in ENDED or stage in HELD:
        gone = Fact(False, stage.value, "its pods are released")
        found = dict.fromkeys(found, gone)
    yield ConditionType.READY, Fact(False, "ChildRefused", refused) if refused else _ready(where, found)
    yield from found.items()
    why = Fact(stage in MOVING, where.reason, where.message)
    yield ConditionType.PROGRESSING, why if stage in MOVING or stage in ENDED else _moves(stage, found)
    for kind, at in (
        (ConditionType.SUSPENDED, Stage.SUSPENDED),
        (ConditionType.COMPLETE, Stage.COMPLETE),
        (ConditionType.FAILED, Stage.FAILED),
    ):
        yield (
            kind,
            Fact(True, where.reason, where.message) if stage is at else Fact(False, f"Not{kind.value}"),
        )


def _ready(where: Where, found: Parts) -> Fact:
    if where.stage in ENDED or where.stage in HELD:
        return Fact(False, where.stage.value, where.message)
    for fact in found.values():
        if not fact.holds:
            return Fact(False, fact.reason, fact.message)
    return Fact(True, "Serving", "head, sidecars and feeders serve")


def _moves(stage: Stage, found: Parts) -> Fact:
    """A job that runs is where it shall be, unless a part of it is on its way back."""
    if stage is Stage.RUNNING and not serves(found):
        return Fact(True, "Recovering", next(f.message for f in found.values() if not f.holds))
    return Fact(False, "AsAskedFor")


def _deployment(seen: Seen, name: str, role: names.Role, needed: int) -> Fact:
    live = seen.children.get(("Deployment", name))
    if live is None:
        return Fact(None, "NotMade", f"Deployment {name} is not there yet")
    ready = int(live.get("status", {}).get("readyReplicas") or 0)
    if ready >= needed:
        return Fact(True, "Serving", f"{ready} ready, {needed} needed")
    if (trouble := troubles.first(seen.of_role(role))) is not None:
        return Fact(False, trouble.reason, str(trouble))
    refused = condition_of(live, "ReplicaFailure")
    if refused is not None and refused["status"] == "True":
        return Fact(False, refused.get("reason") or "PodsRefused", refused.get("message", ""))
    return Fact(False, "PodsStart", f"{ready} ready, {needed} needed")


def _sidecars(seen: Seen) -> Fact:
    """The sidecar of every trainer pod has started: its socket listens."""
    pods, needed = seen.of_role(names.Role.TRAINER), seen.job.spec.trainer.replicas
    started = sum(_started(pod) for pod in pods)
    if started >= needed:
        return Fact(True, "Serving", f"{started} of {needed} listen")
    if (trouble := troubles.first(pods)) is not None:
        return Fact(False, trouble.reason, str(trouble))
    return Fact(False, "PodsStart", f"{started} of {needed} listen")


def _started(pod: Mapping[str, object]) -> bool:
    status = pod.get("status")
    if not isinstance(status, Mapping):
        return False
    if status.get("phase") == "Succeeded":
        return True
    containers = status.get("initContainerStatuses") or ()
    return any(c.get("name") == SIDECAR and c.get("started") for c in containers)
