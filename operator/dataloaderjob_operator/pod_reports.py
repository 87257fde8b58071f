"""The reports about attached pods, sent as events. They concern pods that attach or leave, and pods whose job does not
exist or does not accept pods."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dataloaderjob.api.job import Metadata
from dataloaderjob_operator.decide import attached, pod_events
from dataloaderjob_operator.decide.observed import Observed, Pod
from dataloaderjob_operator.decide.pod_events import AttachedPod
from dataloaderjob_operator.observe.cache import JobKey
from dataloaderjob_operator.recorder import EventRecorder
from dataloaderjob_operator.workqueue import NEVER

MISSING_S = 30.0
"""Seconds for which pods may wait for their job. Users may apply the pods before the job."""


@dataclass(slots=True)
class _Missing:
    since: float
    told: set[str] = field(default_factory=set)
    """Uids of the controllers about which an event has been sent."""


@dataclass(slots=True)
class PodReports:
    """The attached pods of each job at its last reconcile, and the events about their changes."""

    recorder: EventRecorder
    clock: Callable[[], float] = time.monotonic
    known: dict[JobKey, dict[str, AttachedPod]] = field(default_factory=dict)
    """The attached pods with a sidecar at the last reconcile, by uid."""
    missing: dict[JobKey, _Missing] = field(default_factory=dict)
    """Jobs that do not exist although pods name them."""

    async def report(self, key: JobKey, observed: Observed, labeled: Sequence[Pod]) -> None:
        """Sends events about pods that attached or left since the last reconcile, or that cannot attach. If the job had
        started before its first reconcile by this process, its pods are not reported as new. `labeled`: the pods whose
        label names the job."""
        self.missing.pop(key, None)
        if not observed.job.spec.trainers.attached:
            for event in pod_events.of_own_trainers(key[1], attached.present(labeled)):
                await self.recorder.remark(key, observed.job.metadata, event)
            return
        there = {
            str(pod["metadata"].get("uid")): pod_events.attached_pod(pod)
            for pod in attached.with_sidecar(observed)
        }
        before = self.known.get(key)
        self.known[key] = there
        if before is None:
            before = {} if observed.status.start_time is None else there
        for event in pod_events.of_pods(key[1], before, there):
            await self.recorder.send(key, observed.job.metadata, event)

    async def report_missing(self, key: JobKey, labeled: Sequence[Pod]) -> float:
        """Sends events about pods whose job does not exist. Returns the seconds until the next call; NEVER if none is
        needed."""
        found = attached.present(labeled)
        if not found:
            self.missing.pop(key, None)
            return NEVER
        state = self.missing.setdefault(key, _Missing(self.clock()))
        wait_s = state.since + MISSING_S - self.clock()
        if wait_s > 0:
            return wait_s
        namespace, name = key
        about = Metadata(name=name, namespace=namespace, uid=f"{namespace}/{name}")
        for event in pod_events.of_missing_job(namespace, name, found):
            if event.once not in state.told:
                state.told.add(event.once)
                await self.recorder.send(key, about, event)
        return NEVER

    def forget(self, key: JobKey) -> None:
        """Drops the pods of a job that is gone."""
        self.known.pop(key, None)
