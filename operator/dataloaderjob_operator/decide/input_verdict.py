"""The verdict on a job's input, as its status shows it: in the loader's fields, in a column of `kubectl get`, and in
the condition InputBound. Pure.

This module counts feeders in pods, as the spec and `kubectl scale` do. The condition is derived from the status's own
fields, so it changes only when they are written.
"""

from __future__ import annotations

from dataloaderjob.api.feeders import FeedersSpec
from dataloaderjob.api.status import LoaderStatus
from dataloaderjob.core.input_bound import UNKNOWN, InputVerdict, judge
from dataloaderjob.core.measures import Measures
from dataloaderjob.core.sizing import WORTH
from dataloaderjob_operator.decide.health import ConditionState

TOO_FEW = "too few batches so far to tell whether training waits for input"
REASONS = {
    "feeders": "Feeders",
    "storage": "Storage",
    "slots": "Slots",
    "network": "Network",
    "receiver": "Receiver",
    "order": "Order",
    "trainer": "Trainer",
}
"""The condition reason for each limit."""
STEADY = 0.1
"""Minimum change of the recommended number of pods that is worth a write, as a fraction of that number."""


def pods_of(feeders: int, spec: FeedersSpec) -> int:
    """Returns the number of pods for `feeders` feeders."""
    return -(-feeders // spec.processes_per_pod)


def with_verdict(loader: LoaderStatus, measures: Measures | None, spec: FeedersSpec) -> LoaderStatus:
    """Adds the verdict to a loader's metrics."""
    verdict = judge(measures)
    if verdict is None:
        return loader.model_copy(update={"verdict": UNKNOWN, "explanation": TOO_FEW})
    wanted, present = _pods(verdict, spec)
    return loader.model_copy(
        update={
            "verdict": verdict.column(wanted, present),
            "limit": str(verdict.limit),
            "recommended_replicas": wanted,
            "input_bound_percent": f"{100 * verdict.waiting:.0f}",
            "explanation": verdict.sentence(wanted, present, "replicas"),
        }
    )


def _pods(verdict: InputVerdict, spec: FeedersSpec) -> tuple[int, int]:
    """Returns the recommended and the current number of pods. The two are equal if the number should not change."""
    present = pods_of(verdict.now, spec)
    return (present if verdict.feeders == verdict.now else pods_of(verdict.feeders, spec)), present


def differs(written: LoaderStatus, fresh: LoaderStatus) -> bool:
    """Returns True if a verdict differs from the written one by more than noise."""
    if written.limit != fresh.limit:
        return True
    before, after = written.recommended_replicas, fresh.recommended_replicas
    return abs(after - before) > max(0.5, STEADY * before)


def input_bound(loader: LoaderStatus) -> ConditionState:
    """Returns the state of the condition InputBound, derived from a written status."""
    if not loader.limit:
        return ConditionState(None, "TooFewBatches", loader.explanation or TOO_FEW)
    is_bound = float(loader.input_bound_percent or 0) >= 100 * WORTH and loader.limit != "trainer"
    return ConditionState(is_bound, REASONS.get(loader.limit, "Other"), loader.explanation)
