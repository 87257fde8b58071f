"""The reader of the objects that jobs follow. It reads one object at a time, at a fixed pace. The operator does not
watch these objects: they may be of any kind, and each object ends only once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from dataloaderjob.api.attach import FollowSpec
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide import followed
from dataloaderjob_operator.decide.followed import Followed, FollowedState
from dataloaderjob_operator.monitoring import about_job
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

PERIOD_S = 10.0
MIN_INTERVAL_S = 1.0
"""Minimum interval in seconds between two reads of an object, even if the job's pods change more often."""
READS_PER_S = 20
"""Maximum number of reads per second, over all jobs. If more than 200 jobs follow an object, each object is read less
often."""
TICK_S = 0.5
GONE_READS = 3
"""Number of consecutive reads without a result after which an object counts as missing. A user may delete and recreate
the object, or create it shortly after the job."""
PLURALS_S = 300.0
"""Seconds for which the plural of a kind is remembered."""
FORBIDDEN, NOT_FOUND = 403, 404


@dataclass(slots=True)
class _Job:
    follow: FollowSpec
    due: float = 0.0
    read_at: float = float("-inf")
    found: Followed | None = None
    misses: int = 0


class FollowedObjects:
    """The followed objects of all jobs. `run` reads them until it is cancelled."""

    def __init__(
        self, api: ApiClient, changed: Callable[[JobKey], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api, self._changed, self._clock = api, changed, clock
        self._jobs: dict[JobKey, _Job] = {}
        self._plurals: dict[tuple[str, str], tuple[str | None, float]] = {}
        """The plural of each kind, by API version and kind, and the time until which the plural is valid. It is None if
        the kind does not exist or is not namespaced."""

    def found(self, key: JobKey) -> Followed | None:
        """Returns the last read of the followed object; None if there was none yet."""
        job = self._jobs.get(key)
        return None if job is None else job.found

    def want(self, key: JobKey, follow: FollowSpec | None) -> None:
        """Sets the object that a job follows; None if it follows none or has ended."""
        known = self._jobs.get(key)
        if follow is None:
            self._jobs.pop(key, None)
        elif known is None or known.follow != follow:
            self._jobs[key] = _Job(follow)

    def wake(self, key: JobKey) -> None:
        """Schedules an early read of a job's object, because the job's pods have changed. A controller may delete an
        object within seconds of its end."""
        if (job := self._jobs.get(key)) is not None:
            job.due = min(job.due, job.read_at + MIN_INTERVAL_S)

    async def run(self) -> None:
        while True:
            if not await self.turn():
                await asyncio.sleep(TICK_S)
            else:
                await asyncio.sleep(1 / READS_PER_S)

    async def turn(self) -> bool:
        """Reads the most overdue object. Returns False if no read is due."""
        key, job = min(self._jobs.items(), key=lambda item: item[1].due, default=(None, None))
        if key is None or job is None or job.due > self._clock():
            return False
        job.read_at = self._clock()
        job.due = job.read_at + max(PERIOD_S, len(self._jobs) / READS_PER_S)
        with about_job(*key):
            try:
                found = await self._read(key[0], job.follow)
            except ApiError as exc:
                log.warning("cannot read the followed %s: %s", job.follow, exc)
                return True
        if self._jobs.get(key) is job:
            self._note(key, job, found)
        return True

    def _note(self, key: JobKey, job: _Job, found: Followed) -> None:
        before = job.found
        job.misses = job.misses + 1 if found.state is FollowedState.MISSING else 0
        if 0 < job.misses < GONE_READS:
            return
        job.found = found
        if found != before:
            self._changed(key)

    async def _read(self, namespace: str, follow: FollowSpec) -> Followed:
        """Reads an object once. Raises ApiError if a later read may succeed."""
        plural = await self._plural(follow)
        if plural is None:
            return followed.unknown_kind(follow)
        path = f"{_root(follow)}/namespaces/{namespace}/{plural}/{quote(follow.name)}"
        try:
            return followed.read(await self._api.get(path), follow)
        except ApiError as exc:
            if exc.code == FORBIDDEN:
                return followed.forbidden(follow, plural)
            if exc.code == NOT_FOUND:
                return followed.missing(follow)
            raise

    async def _plural(self, follow: FollowSpec) -> str | None:
        """Returns the plural of a kind, from the API server's own list of kinds."""
        if not follow.group and follow.kind != "Pod":
            return None  # no other kind of the core group ends by itself
        known, until = self._plurals.get((follow.api_version, follow.kind), (None, 0.0))
        if known is not None and self._clock() < until:
            return known
        try:
            listed = (await self._api.get(_root(follow))).get("resources") or ()
        except ApiError as exc:
            if exc.code != NOT_FOUND:
                raise
            return None
        names = (
            str(item["name"])
            for item in listed
            if item.get("kind") == follow.kind and item.get("namespaced") and "/" not in str(item["name"])
        )
        found = next(names, None)
        self._plurals[follow.api_version, follow.kind] = found, self._clock() + PLURALS_S
        return found


def _root(follow: FollowSpec) -> str:
    return f"/apis/{follow.api_version}" if follow.group else f"/api/{follow.api_version}"
