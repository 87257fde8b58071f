"""Sends the events of jobs. It never fails, and waits for seconds at most: what cannot be sent is lost, and the status
has it all."""

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
from dataloaderjob_operator.client import ApiError, Client
from dataloaderjob_operator.decide import events
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


@dataclass(slots=True)
class EventRecorder:
    """Sends events of jobs, no more than their budget allows."""

    api: Client
    now: Callable[[], datetime]
    clock: Callable[[], float] = time.monotonic
    host: str = field(default_factory=socket.gethostname)
    budget: events.Budget = field(default_factory=events.Budget)
    jobs: dict[JobKey, str] = field(default_factory=dict)
    """Uids of the jobs that have had events."""
    remarks: defaultdict[JobKey, set[events.Event]] = field(default_factory=lambda: defaultdict(set))
    """Events beside those of a change, which were sent."""

    async def record(
        self, key: JobKey, about: Metadata, before: DataLoaderJobStatus, after: DataLoaderJobStatus
    ) -> None:
        """Sends the events of a change: `after` has been written in place of `before`."""
        for event in events.events_of(before, after):
            await self._record(key, about, event)

    async def remark(self, key: JobKey, about: Metadata, event: events.Event) -> None:
        """Sends an event that no change of the status makes, once."""
        if event not in self.remarks[key]:
            self.remarks[key].add(event)
            await self._record(key, about, event)

    async def _record(self, key: JobKey, about: Metadata, event: events.Event) -> None:
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
            log.warning("cannot send the event %s: %s", event.reason, exc or f"{TIMEOUT_S:.0f} s")

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self.budget.forget(self.jobs.pop(key, ""))
        self.remarks.pop(key, None)
