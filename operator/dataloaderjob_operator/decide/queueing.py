"""The queueing of jobs. A queued job's pods wait for a node, for admission by a queue such as Kueue, or for a
RayCluster. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dataloaderjob_operator import names
from dataloaderjob_operator.decide import external
from dataloaderjob_operator.decide.health import ConditionState, Health, suspended
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.decide.pod_troubles import trouble_of
from dataloaderjob_operator.names import Role

UNPLACED = frozenset({"Unschedulable", "SchedulingGated"})


@dataclass(frozen=True, slots=True)
class QueuedRole:
    """The role whose pods are queued, and the reason."""

    role: Role
    why: ConditionState


def queue_of(observed: Observed, health: Health) -> QueuedRole | None:
    """Returns the first role with too few pods on nodes, beginning with the trainers; None if every role has enough."""
    return next(_queues(observed, health), None)


def _queues(observed: Observed, health: Health) -> Iterator[QueuedRole]:
    live = observed.children.get(("Job", names.trainers(observed.job.name, observed.attempt)))
    if live is not None and suspended(live):
        yield QueuedRole(Role.TRAINER, health.trainer_pods)
    if (waits := external.waits(observed)) is not None:
        yield QueuedRole(Role.HEAD, waits)
    spec = observed.job.spec
    needed = {
        Role.TRAINER: spec.trainers.replicas,
        Role.HEAD: 1,
        Role.FEEDER: spec.feeders.min_available,
    }
    for role, count in needed.items():
        pods = health.roles[role].pods
        found = sorted((t for t in map(trouble_of, pods) if t and t.reason in UNPLACED), key=lambda t: t.pod)
        if found and len(pods) - len(found) < count:
            yield QueuedRole(role, ConditionState(False, found[0].reason, str(found[0])))
