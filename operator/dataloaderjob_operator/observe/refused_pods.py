"""The search for refusals of labeled pods. It lists the Warning events in the namespaces of jobs with attached
trainers, one namespace at a time, at a fixed pace. It does not watch events, because most of them concern no job."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from dataloaderjob.api import DataLoaderJob, ManifestError
from dataloaderjob.api.job import Metadata
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide import refused_pods
from dataloaderjob_operator.decide.events import JobEvent
from dataloaderjob_operator.decide.refused_pods import RefusedPod
from dataloaderjob_operator.monitoring import about_job
from dataloaderjob_operator.objects import OperatorConfig
from dataloaderjob_operator.observe.cache import Cache, JobKey

log = logging.getLogger(__name__)

PERIOD_S = 15.0
LISTS_PER_S = 4
"""Maximum number of lists per second. With jobs in more than 60 namespaces, each namespace is listed less often."""
TICK_S = 0.5
MAX_REMEMBERED = 1000
"""Maximum number of refusals that are remembered for one namespace."""
MAX_REPORTS = 10
"""Maximum number of refusals reported after one list. The others wait for the next list."""
Report = Callable[[JobKey, Metadata, JobEvent], Awaitable[None]]


@dataclass(slots=True)
class _Namespace:
    jobs: set[str] = field(default_factory=set)
    due: float = 0.0
    reported: dict[tuple[str, str, str], RefusedPod] = field(default_factory=dict)
    """Refusals as last reported, by the job's uid and the refusal's identity."""


class RefusedPods:
    """The refused pods of all jobs with attached trainers. `run` reports them until it is cancelled."""

    def __init__(
        self,
        api: ApiClient,
        cache: Cache,
        setup: OperatorConfig,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api, self._cache, self._setup, self._report = api, cache, setup, report
        self._clock, self._now = clock, now
        self._namespaces: dict[str, _Namespace] = {}

    def want(self, key: JobKey, wanted: bool) -> None:
        """Sets whether refusals are reported on a job. Callers pass True if the job has attached trainers."""
        namespace, name = key
        if wanted:
            self._namespaces.setdefault(namespace, _Namespace()).jobs.add(name)
        elif (found := self._namespaces.get(namespace)) is not None:
            found.jobs.discard(name)
            if not found.jobs:
                del self._namespaces[namespace]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1 / LISTS_PER_S if await self.turn() else TICK_S)

    async def turn(self) -> bool:
        """Lists the Warning events of the namespace whose list is most overdue. Returns False if none is due."""
        name, found = min(self._namespaces.items(), key=lambda item: item[1].due, default=(None, None))
        if name is None or found is None or found.due > self._clock():
            return False
        found.due = self._clock() + max(PERIOD_S, len(self._namespaces) / LISTS_PER_S)
        left = MAX_REPORTS
        try:
            for refusal in refused_pods.refused_pods(await self._api.warnings(name)):
                left -= await self._note(name, found, refusal)
                if left <= 0:
                    break
        except ApiError as exc:
            log.warning("cannot search namespace %s for refused pods: %s", name, exc)
        return True

    async def _note(self, namespace: str, found: _Namespace, refusal: RefusedPod) -> bool:
        """Reports a refusal on the job that it names, or else on the job that the pod template names. If neither names
        a job, reports the refusal on all jobs in the namespace, unless pods without the label may cause it
        (`is_general`). Returns False if no job is due for a report."""
        wanted = sorted(found.jobs & {refusal.job} if refusal.job else found.jobs)
        due = [name for name in wanted if self._take(found, (namespace, name), refusal)]
        if not due:
            return False
        owner = None if refusal.source is None else await self._api.read(namespace, refusal.source)
        for name in due:
            job = self._job((namespace, name))
            if job is None or not refused_pods.concerns(refusal, owner, name):
                continue
            event = refused_pods.event_of(refusal, refused_pods.explained(refusal, owner, job, self._setup))
            with about_job(namespace, name):
                await self._report((namespace, name), job.metadata, event)
        return True

    def _take(self, found: _Namespace, key: JobKey, refusal: RefusedPod) -> bool:
        """Checks whether a refusal should be reported on a job now. If so, remembers it as reported."""
        identity = self._cache.uid(key) or "", *refusal.identity
        if not refused_pods.is_due(refusal, found.reported.get(identity), self._now()):
            return False
        found.reported.pop(identity, None)
        found.reported[identity] = refusal
        if len(found.reported) > MAX_REMEMBERED:
            del found.reported[next(iter(found.reported))]
        return True

    def _job(self, key: JobKey) -> DataLoaderJob | None:
        """Returns a job; None if the job is gone or the models refuse it."""
        try:
            observed = self._cache.observed(key)
        except ManifestError:
            return None
        return None if observed is None else observed.job
