"""The autoscaler for the feeders of jobs with `autoscaling.mode: Auto`. It uses the scale subresource, as `kubectl
scale` does.

The policy is pure (`dataloaderjob.core.autoscaling`). Its state lives in this process. After a restart of the operator,
the policy starts over and removes no feeders for some minutes. This module does not scale a job that a
HorizontalPodAutoscaler targets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dataloaderjob.api.job import GROUP, KIND
from dataloaderjob.core.autoscaling import EVERY_S, Autoscaler
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide import autoscale
from dataloaderjob_operator.decide.autoscale import ScalingTarget
from dataloaderjob_operator.decide.observed import ScalingReport, SupervisorStatus
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

TICK_S = 2.0
CHECK_S = 60.0
"""Seconds for which a list of a namespace's HorizontalPodAutoscalers is reused."""
CANNOT_CHECK = "cannot list HorizontalPodAutoscalers, so one may be scaling this job"


@dataclass(slots=True)
class _Job:
    target: ScalingTarget
    policy: Autoscaler = field(default_factory=Autoscaler)
    due: float = 0.0
    report: ScalingReport | None = None


class Autoscalers:
    """The policies of all jobs in `Auto` mode. `run` scales the jobs until it is cancelled."""

    def __init__(
        self,
        api: ApiClient,
        supervisor: Callable[[JobKey], SupervisorStatus | None],
        version: Callable[[JobKey], str],
        changed: Callable[[JobKey], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`supervisor` returns a job's last report. `version` returns a job's resourceVersion. `changed` is called with
        the key of each job that has a new report."""
        self._api, self._supervisor, self._version, self._changed = api, supervisor, version, changed
        self._clock = clock
        self._jobs: dict[JobKey, _Job] = {}
        self._others: dict[str, tuple[float, Mapping[str, str] | None]] = {}
        """The last list of each namespace's autoscalers. The tuple holds the time of the request, and a mapping from a
        job to the autoscaler that scales it. The mapping is None if the request failed."""

    def want(self, key: JobKey, target: ScalingTarget | None) -> None:
        """Sets the job's current target. None means that the job must not be scaled."""
        if target is None:
            self._jobs.pop(key, None)
        elif (job := self._jobs.get(key)) is None:
            self._jobs[key] = _Job(target)
        else:
            job.target = target

    def report(self, key: JobKey) -> ScalingReport | None:
        return self._jobs[key].report if key in self._jobs else None

    async def run(self) -> None:
        while True:
            await self.tick()
            await asyncio.sleep(TICK_S)

    async def tick(self) -> None:
        """Evaluates the policies of all jobs that are due."""
        for key, job in list(self._jobs.items()):
            now = self._clock()
            if job.due > now:
                continue
            job.due = now + EVERY_S
            try:
                await self._one(key, job, now)
            except ApiError as exc:
                log.warning("%s/%s: cannot scale the feeders: %s", *key, exc)
            except Exception:  # one job's error must not end the scaling of all jobs
                log.exception("%s/%s: an error in the operator prevents the scaling of feeders", *key)
        for namespace in set(self._others) - {namespace for namespace, _ in self._jobs}:
            del self._others[namespace]

    async def _one(self, key: JobKey, job: _Job, now: float) -> None:
        others = await self._autoscalers(key[0], now)
        if others is None or key[1] in others:
            job.policy = Autoscaler()
            self._tell(key, job, _refusal(others, key[1]))
            return
        target = job.target
        job.policy.bounds = target.bounds
        proposal = job.policy.step(now, target.situation(self._supervisor(key)))
        replicas = proposal.feeders // target.per_pod
        if replicas != target.replicas:
            if self._jobs.get(key) is not job or job.target is not target:
                return  # the job changed while its autoscalers were listed
            await self._api.scale(*key, self._version(key), replicas)
            log.info("%s/%s: replicas %d -> %d: %s", *key, target.replicas, replicas, proposal.text)
        self._tell(key, job, autoscale.report_of(job.report, target, proposal))

    def _tell(self, key: JobKey, job: _Job, report: ScalingReport) -> None:
        if report != job.report:
            job.report = report
            self._changed(key)

    async def _autoscalers(self, namespace: str, now: float) -> Mapping[str, str] | None:
        """Returns the namespace's HorizontalPodAutoscalers, as a mapping from a job to the autoscaler that targets it.
        Returns None if they cannot be listed."""
        at, known = self._others.get(namespace, (float("-inf"), None))
        if now - at < CHECK_S and known is not None:
            return known
        try:
            found = targets(await self._api.autoscalers(namespace))
        except ApiError as exc:
            log.warning("%s: cannot list HorizontalPodAutoscalers: %s", namespace, exc)
            found = None
        self._others[namespace] = now, found
        return found


def targets(listed: list[Mapping[str, Any]]) -> dict[str, str]:
    """Maps each DataLoaderJob to the HorizontalPodAutoscaler that targets it."""
    found = {}
    for item in listed:
        ref = (item.get("spec") or {}).get("scaleTargetRef") or {}
        if ref.get("kind") == KIND and str(ref.get("apiVersion") or GROUP).partition("/")[0] == GROUP:
            found[str(ref.get("name"))] = str(item["metadata"]["name"])
    return found


def _refusal(others: Mapping[str, str] | None, job: str) -> ScalingReport:
    if others is None:
        return ScalingReport(False, "NotAllowed", CANNOT_CHECK)
    return autoscale.blocked_by(others[job])
