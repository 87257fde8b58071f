"""Tells what became of jobs: sends events after a status was written. It never fails, and waits for seconds at most.

An event that cannot be sent is lost, as is one whose operator dies between the status and it: the status has it all.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.status import DataLoaderJobStatus
from dataloaderjob_operator.client import Api, ApiError
from dataloaderjob_operator.decide.events import Budget, Event, events_of, manifest
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


@dataclass(slots=True)
class Reporter:
    """Events of all jobs."""

    api: Api
    now: Callable[[], datetime]
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=socket.gethostname)
    budget: Budget = field(default_factory=Budget)
    jobs: dict[JobKey, str] = field(default_factory=dict)
    """Uids of those told of."""

    async def tell(
        self, key: JobKey, job: DataLoaderJob, before: DataLoaderJobStatus, after: DataLoaderJobStatus
    ) -> None:
        """`after` has been written in place of `before`."""
        uid = self.jobs[key] = job.metadata.uid or ""
        for event in events_of(before, after):
            log.log(
                logging.WARNING if event.type == "Warning" else logging.INFO, "%s: %s", event.reason, event.message
            )  # fmt: skip
            if self.budget.take(uid, event.reason, self.clock()):
                await self._send(event, job)

    async def _send(self, event: Event, job: DataLoaderJob) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.api.tell(manifest(event, job, self.now(), self.host))
        except (ApiError, TimeoutError) as exc:
            log.warning("could not send the event %s: %s", event.reason, exc or f"{TIMEOUT_S:.0f} s")

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self.budget.forget(self.jobs.pop(key, ""))
