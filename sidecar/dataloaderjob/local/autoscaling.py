"""The autoscaling of `dataloaderjob run` in mode Auto. The policy is the cluster's, limited to the CPUs of this
machine."""

from __future__ import annotations

from collections.abc import Callable

from dataloaderjob.api.feeders import AutoscalingMode, FeedersSpec
from dataloaderjob.core import measures
from dataloaderjob.core.autoscaling import EVERY_S, Autoscaler, Bounds, Situation
from dataloaderjob.core.measures import Measures
from dataloaderjob.local.status import Snapshot

SMALLEST_SHARE = 0.1
"""Minimum share of a CPU that a feeder is expected to use, however long it waits for data."""


def bounds_of(spec: FeedersSpec) -> Bounds | None:
    """Returns the bounds on the number of feeders of a run; None unless the mode is Auto."""
    if spec.autoscaling.mode is not AutoscalingMode.AUTO:
        return None
    least, most = (pods * spec.processes_per_pod for pods in spec.autoscaling_bounds())
    return Bounds(least=least, most=most)


def within_cpus(bounds: Bounds, found: Measures | None, desired: int, cpus: int) -> Bounds:
    """Lowers the maximum to the number of feeders for which the machine has CPUs, but not below the current number."""
    share = min(1.0, found.cpu_s / found.wall_s) if found is not None and found.wall_s else 1.0
    fit = int(cpus / max(SMALLEST_SHARE, share))
    return Bounds(least=bounds.least, most=max(bounds.least, min(bounds.most, max(fit, desired))))


class RunAutoscaler:
    """The autoscaler of one run. Call `look` often; it takes action at most every EVERY_S seconds."""

    def __init__(
        self,
        bounds: Bounds,
        per_pod: int,
        cpus: int,
        *,
        scale: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        self._policy, self._bounds, self._cpus = Autoscaler(bounds), bounds, cpus
        self._per_pod, self._scale, self._say = per_pod, scale, say
        self._due = 0.0

    def look(self, now: float, snapshot: Snapshot, *, frozen: str) -> None:
        """Evaluates a snapshot. `frozen`: the reason not to change anything now; empty if there is none."""
        desired = snapshot.desired
        if now < self._due or desired is None:
            return
        self._due = now + EVERY_S
        found = measures.parse(snapshot.supervisor.get("measures"))
        self._policy.bounds = within_cpus(self._bounds, found, desired, self._cpus)
        situation = Situation(
            desired=desired, ready=snapshot.ready, measures=found,
            frozen=frozen, step=self._per_pod,
        )  # fmt: skip
        proposal = self._policy.step(now, situation)
        if proposal.changes(situation):
            self._scale(proposal.feeders)
            self._say(f"feeders {desired} -> {proposal.feeders}: {proposal.text}")
