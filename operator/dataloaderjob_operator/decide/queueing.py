"""What a job queues for: a node for its pods, or leave of whoever holds them back, such as Kueue. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dataloaderjob_operator import names
from dataloaderjob_operator.decide.health import ConditionState, Health, suspended
from dataloaderjob_operator.decide.observed import Observed, trouble_of
from dataloaderjob_operator.names import Role

UNPLACED = frozenset({"Unschedulable", "SchedulingGated"})


@dataclass(frozen=True, slots=True)
class Queue:
    """The role that queues, and why."""

    role: Role
    why: ConditionState


def queue_of(observed: Observed, health: Health) -> Queue | None:
    """The first role of which fewer pods than are needed have a node; None if all have. Trainers come first."""
    return next(_queues(observed, health), None)


def _queues(observed: Observed, health: Health) -> Iterator[Queue]:
    live = observed.children.get(("Job", names.trainers(observed.job.name, observed.attempt)))
    if live is not None and suspended(live):
        yield Queue(Role.TRAINER, health.trainer_pods)
    spec = observed.job.spec
    needed = {
        Role.TRAINER: spec.trainers.job.replicas,
        Role.HEAD: 1,
        Role.FEEDER: spec.feeders.min_available,
    }
    for role, count in needed.items():
        pods = health.roles[role].pods
        found = sorted((t for t in map(trouble_of, pods) if t and t.reason in UNPLACED), key=lambda t: t.pod)
        if found and len(pods) - len(found) < count:
            yield Queue(role, ConditionState(False, found[0].reason, str(found[0])))
