"""The lookups of the RayClusters that jobs name, until their addresses are known. The operator does not watch
RayClusters, because KubeRay may not be installed, and because a job needs the address only once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide import ray_clusters
from dataloaderjob_operator.decide.ray_clusters import RayCluster
from dataloaderjob_operator.monitoring import about_job
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

PERIOD_S = 10.0
READS_PER_S = 10
"""Maximum number of lookups per second, over all jobs."""
TICK_S = 0.5
FORBIDDEN, NOT_FOUND = 403, 404


@dataclass(slots=True)
class _Job:
    cluster: str
    due: float = 0.0
    found: RayCluster | None = None


class RayClusters:
    """The RayClusters of all jobs that wait for one. `run` looks them up until it is cancelled."""

    def __init__(
        self, api: ApiClient, changed: Callable[[JobKey], None], *, domain: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`domain`: the DNS domain of the Kubernetes cluster; if empty, pods add it themselves."""
        self._api, self._changed, self._domain, self._clock = api, changed, domain, clock
        self._jobs: dict[JobKey, _Job] = {}

    def found(self, key: JobKey) -> RayCluster | None:
        """Returns the last lookup for a job; None if there was none yet."""
        job = self._jobs.get(key)
        return None if job is None else job.found

    def want(self, key: JobKey, cluster: str | None) -> None:
        """Sets the RayCluster whose address a job needs; None if the job needs none, or already has it."""
        known = self._jobs.get(key)
        if cluster is None:
            self._jobs.pop(key, None)
        elif known is None or known.cluster != cluster:
            self._jobs[key] = _Job(cluster)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(1 / READS_PER_S if await self.turn() else TICK_S)

    async def turn(self) -> bool:
        """Performs the most overdue lookup. Returns False if no lookup is due."""
        key, job = min(self._jobs.items(), key=lambda item: item[1].due, default=(None, None))
        if key is None or job is None or job.due > self._clock():
            return False
        job.due = self._clock() + max(PERIOD_S, len(self._jobs) / READS_PER_S)
        with about_job(*key):
            try:
                found = await self._look(key[0], job.cluster)
            except ApiError as exc:
                log.warning("cannot look up RayCluster %s: %s", job.cluster, exc)
                return True
        if self._jobs.get(key) is job and found != job.found:
            job.found = found
            self._changed(key)
        return True

    async def _look(self, namespace: str, cluster: str) -> RayCluster:
        """Looks up a RayCluster once. Raises ApiError if a later lookup may succeed."""
        readable, exists, service = True, False, ray_clusters.service_name(cluster)
        try:
            live = await self._api.get(f"{ray_clusters.ROOT}/namespaces/{namespace}/rayclusters/{cluster}")
            exists, service = True, ray_clusters.reported_service(live) or service
        except ApiError as exc:
            if exc.code not in (FORBIDDEN, NOT_FOUND):
                raise
            readable = exc.code != FORBIDDEN
        found = await self._api.read(namespace, ("Service", service))
        if found is None:
            text = ray_clusters.no_service(cluster, service, readable=readable, exists=exists)
            return RayCluster(cluster, missing=text)
        return RayCluster(cluster, address=ray_clusters.address(found, namespace, self._domain))
