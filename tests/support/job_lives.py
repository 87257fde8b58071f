"""A job's life in virtual time, with trainers that fail as a test says."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from observed_jobs import BASE, FEEDERS, HEAD, SUPERVISOR, T0, decided, job, keys, live, pod

from dataloaderjob.api.status import DataLoaderJobStatus
from dataloaderjob.core.supervision import Rates
from dataloaderjob_operator.decide.decision import Decision
from dataloaderjob_operator.decide.observed import Observed, Pod, show_time

BUSY = replace(SUPERVISOR, rates=Rates(batches_per_s=9.0))
IDLE = replace(SUPERVISOR, rates=Rates())


def of_attempt(attempt: int, number: int = 0, **status: Any) -> dict[str, Any]:
    made = pod("trainer", attempt=attempt, **status)
    made["metadata"] |= {"name": f"mnist-trainers-{attempt}-{number}"}
    made["metadata"]["labels"]["dataloading.dev/attempt"] = str(attempt)
    made["spec"] = {"nodeName": f"node-{number}", "restartPolicy": "Never"}
    return made


def ended(code: int, at: float = 0.0, **more: Any) -> dict[str, Any]:
    state = {"exitCode": code, "finishedAt": show_time(T0 + timedelta(seconds=at)), **more}
    return {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": state}}]}


def target(reason: str) -> dict[str, Any]:
    found = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": f"ended by {reason}"}
    return {"conditions": [found]}


def gone_by(found: Pod, seconds: float, grace_s: int = 30) -> dict[str, Any]:
    """It is being deleted, and its grace period ends then."""
    at = show_time(T0 + timedelta(seconds=seconds))
    metadata = {**found["metadata"], "deletionTimestamp": at, "deletionGracePeriodSeconds": grace_s}
    return {**found, "metadata": metadata}


class Life:
    """A job that runs, and whose trainers fail as a test says, in virtual time."""

    def __init__(self, **policy: Any) -> None:
        self.job = job(**{"trainers.job.failurePolicy": policy})
        self.status = DataLoaderJobStatus()
        self.now = 0.0
        self.supervisor = IDLE
        self.runs()

    @property
    def attempt(self) -> int:
        return self.status.trainers.restarts

    def observed(self, pods: tuple[Pod, ...], **trainers: Any) -> Observed:
        children = live(*BASE) | live(HEAD, FEEDERS, readyReplicas=1, replicas=1, updatedReplicas=1)
        if trainers:
            children |= live(("Job", f"mnist-trainers-{self.attempt}"), **trainers)
        up = (pod("head"), pod("feeder"), *pods)
        return Observed(
            job=self.job, status=self.status, children=children, pods=up, supervisor=self.supervisor
        )

    def decide(self, observed: Observed) -> Decision:
        made = decided(observed, self.now)
        self.status = made.status
        return made

    def runs(self, seconds: float = 0.0) -> Decision:
        """All trainers of the present attempt run for so long."""
        running = {"containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        observed = self.observed((of_attempt(self.attempt, **running),), active=1)
        self.decide(observed)
        self.now += seconds
        return self.decide(replace(observed, status=self.status))

    def fails(self, *pods: Pod, **trainers: Any) -> Decision:
        since = show_time(T0 + timedelta(seconds=self.now - 10))
        failed = {"type": "Failed", "status": "True", "lastTransitionTime": since}
        found = pods or (of_attempt(self.attempt, **ended(1)),)
        return self.decide(self.observed(found, conditions=[failed], **trainers))

    def starts_after(self) -> float:
        """Seconds until the next attempt is made, once the last one is gone."""
        began = self.now
        for _ in range(9):
            made = decided(self.observed(()), self.now)
            self.status = made.status
            if any(kind == "Job" for kind, _ in keys(made)):
                return self.now - began
            assert made.requeue_after_s is not None
            self.now += made.requeue_after_s
        raise AssertionError("no attempt is made")
