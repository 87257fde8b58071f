"""The sender of the events of jobs. Sending never raises an error, and takes at most a few seconds. An event that
cannot be sent is lost, but the job's status contains the same information."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from dataloaderjob.api.job import Metadata
from dataloaderjob.api.status import DataLoaderJobStatus
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide import events
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


@dataclass(slots=True)
class EventRecorder:
    """The sender of events, limited by each job's budget."""

    api: ApiClient
    now: Callable[[], datetime]
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=socket.gethostname)
    budget: events.Budget = field(default_factory=events.Budget)
    jobs: dict[JobKey, str] = field(default_factory=dict)
    """Uids of the jobs for which events have been sent."""
    remarks: defaultdict[JobKey, set[events.JobEvent]] = field(default_factory=lambda: defaultdict(set))
    """Events that were sent and do not follow from a change of status."""

    async def record(
        self, key: JobKey, about: Metadata, before: DataLoaderJobStatus, after: DataLoaderJobStatus
    ) -> None:
        """Sends the events of a change of status, from `before` to `after`."""
        for event in events.events_of(before, after):
            await self.send(key, about, event)

    async def remark(self, key: JobKey, about: Metadata, event: events.JobEvent) -> None:
        """Sends an event that does not follow from a change of status, unless this process has sent it before."""
        if event not in self.remarks[key]:
            self.remarks[key].add(event)
            await self.send(key, about, event)

    async def send(self, key: JobKey, about: Metadata, event: events.JobEvent) -> None:
        """Sends an event, unless the job's budget is used up."""
        uid = self.jobs[key] = about.uid or ""
        log.log(
            logging.WARNING if event.type == "Warning" else logging.INFO,
            "%s: %s",
            event.reason,
            event.message,
        )
        if not self.budget.take(uid, event.reason, self.clock()):
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self.api.create_event(events.manifest(event, about, self.now(), self.host))
        except (ApiError, TimeoutError) as exc:
            log.warning(
                "cannot send the event %s: %s", event.reason, exc or f"no answer within {TIMEOUT_S:.0f} s"
            )

    def forget(self, key: JobKey) -> None:
        """Drops all state of a job that is gone."""
        self.budget.forget(self.jobs.pop(key, ""))
        self.remarks.pop(key, None)
