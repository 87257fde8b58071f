"""The parts of a job: the head, the feeders, the sidecars and the trainers. The state of each part names the failing
pod and the cause. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dataloaderjob.api.status import ConditionType
from dataloaderjob.core.supervision import LASTING
from dataloaderjob_operator.decide.health import WAITS, ConditionState, Health
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.decide.pod_troubles import NODE_UNREACHABLE

STARTS = frozenset(
    {
        "NotMade",
        "LooksForRayCluster",
        "PodsStart",
        "PodsLeave",
        "SupervisorStarts",
        "RayStarts",
        "FeedersStart",
        "FeederStarts",
        WAITS,
    }
)
"""Condition reasons that show that a part is merely starting."""
Parts = Mapping[ConditionType, ConditionState]
"""The states of the conditions HeadReady, FeedersReady, SidecarsReady and TrainersReady."""


def parts(observed: Observed, health: Health) -> Parts:
    """Returns the states of the head, the feeders, the sidecars and the trainers, each with the failing pod and the
    cause."""
    return {
        ConditionType.HEAD_READY: _head(observed, health.head_pods),
        ConditionType.FEEDERS_READY: _feeders(observed, health.feeder_pods),
        ConditionType.SIDECARS_READY: health.sidecars,
        ConditionType.TRAINERS_READY: health.trainer_pods,
    }


def serves(found: Parts, *, attaches: bool = False) -> bool:
    """Returns True if all parts serve. `attaches`: True if other controllers create the trainers' pods."""
    return not lacking_parts(found, attaches=attaches)


def lacking_parts(found: Parts, *, attaches: bool) -> list[ConditionState]:
    """Returns the parts that do not serve. Attached pods do not count while they start, or if their own containers or
    nodes fail. The pods' controllers are responsible for these failures."""

    def excused(kind: ConditionType, state: ConditionState) -> bool:
        lacks = kind is ConditionType.SIDECARS_READY and state.reason in STARTS | {NODE_UNREACHABLE}
        return attaches and (lacks or kind is ConditionType.TRAINERS_READY)

    return [state for kind, state in found.items() if not state.holds and not excused(kind, state)]


def _head(observed: Observed, pods: ConditionState) -> ConditionState:
    """Returns the state of the head. The head serves if its pod is ready, and the supervisor answers and is connected
    to Ray."""
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
            f"the supervisor in its pod does not respond: {supervisor.silent}"
            + ("; the pod is being replaced" if supervisor.hung else ""),
        )
    if not supervisor.ray.version:
        return ConditionState(False, "RayStarts", "Ray has not responded to the supervisor in its pod yet")
    return ConditionState(True, "Serving", "Ray and the supervisor respond")


def _feeders(observed: Observed, pods: ConditionState) -> ConditionState:
    """Returns the state of the feeders. They serve if the supervisor reports enough of them for `minAvailable` pods,
    and no trainer is stuck on an error from a feeder."""
    supervisor, serving = observed.supervisor, observed.serving()
    needed = observed.job.spec.feeders.min_available
    if pods.holds is None:
        return pods
    if supervisor is not None and supervisor.failure is not None:
        return ConditionState(False, supervisor.failure.reason, observed.describe(supervisor.failure))
    count = f"feeder pods serving: {serving} of {needed} required"
    if serving >= needed:
        return ConditionState(True, "Serving", f"feeder pods serving: {needed} or more")
    if not pods.holds and pods.reason != "PodsStart":
        return pods
    cause = None if supervisor is None else supervisor.cause
    if cause is not None and (pods.holds or cause.reason in LASTING):
        return ConditionState(False, cause.reason, f"{count}; {observed.describe(cause)}")
    return ConditionState(False, "FeedersStart", count) if pods.holds else pods
