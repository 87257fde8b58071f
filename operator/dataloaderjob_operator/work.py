"""Workers that take jobs off the schedule and reconcile them, a few at a time. The clock is the event loop's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from dataloaderjob_operator.cache import JobKey
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.schedule import Schedule

log = logging.getLogger(__name__)

RESYNC_S = 600.0
"""Each job is looked at so often without an event: what a watch missed is found then."""
Reconcile = Callable[[JobKey], Awaitable[float | None]]


class Work:
    """`add` from watches, `run` until cancelled."""

    def __init__(self, reconcile: Reconcile, *, workers: int = 8) -> None:
        self._reconcile, self._workers = reconcile, workers
        self._schedule: Schedule[JobKey] = Schedule()
        self._changed = asyncio.Event()
        self.reconciles = 0
        self.errors = 0

    def __len__(self) -> int:
        return len(self._schedule)

    def add(self, key: JobKey, after_s: float = 0.0) -> None:
        self._schedule.add(key, time.monotonic(), after_s)
        self._changed.set()

    def forget(self, key: JobKey) -> None:
        self._schedule.forget(key)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        while True:
            key = self._schedule.take(time.monotonic())
            if key is None:
                await self._wait()
            else:
                await self._one(key)

    async def _wait(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(self._schedule.wait_s(time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _one(self, key: JobKey) -> None:
        self.reconciles += 1
        try:
            again_s = await self._reconcile(key)
        except ApiError as exc:
            self.errors += 1
            wait_s = self._schedule.failed(key, time.monotonic(), exc.retry_after_s)
            log.warning("%s/%s is tried again in %.1f s: %s", *key, wait_s, exc)
        except Exception:
            self.errors += 1
            wait_s = self._schedule.failed(key, time.monotonic())
            log.exception("%s/%s is tried again in %.1f s", *key, wait_s)
        else:
            self._schedule.done(
                key, time.monotonic(), RESYNC_S if again_s is None else min(again_s, RESYNC_S)
            )
        self._changed.set()
