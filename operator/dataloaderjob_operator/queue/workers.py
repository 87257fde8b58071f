"""Workers that take jobs off the workqueue and reconcile them, a few at a time. The clock is the event loop's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from dataloaderjob_operator import logs
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.metrics import Metrics, error_kind
from dataloaderjob_operator.observe.cache import JobKey
from dataloaderjob_operator.queue.workqueue import WorkQueue

log = logging.getLogger(__name__)

RESYNC_S = 600.0
"""Each job is looked at so often without an event."""
LEAST_S = 0.05
"""Between two looks at a job, whatever it asks for."""
NEVER = float("inf")
Reconcile = Callable[[JobKey], Awaitable[float | None]]
"""Returns after how many seconds to look again, None for the resync, NEVER for a job that is gone."""


class Workers:
    """`add` from watches, `run` until cancelled."""

    def __init__(
        self,
        reconcile: Reconcile,
        *,
        workers: int = 8,
        metrics: Metrics | None = None,
        resync_s: float = RESYNC_S,
    ) -> None:
        self._reconcile, self._workers, self._resync_s = reconcile, workers, resync_s
        self._queue: WorkQueue[JobKey] = WorkQueue()
        self._changed = asyncio.Event()
        self._metrics = metrics or Metrics()
        self._metrics.queue_depth.set_function(lambda: self._queue.backlog(time.monotonic()))

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, key: JobKey, after_s: float = 0.0) -> None:
        self._queue.add(key, time.monotonic(), after_s)
        self._changed.set()

    def forget(self, key: JobKey) -> None:
        self._queue.forget(key)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._worker())

    async def _worker(self) -> None:
        while True:
            key = self._queue.take(time.monotonic())
            if key is None:
                await self._wait()
            else:
                await asyncio.sleep(
                    0
                )  # a look that neither asks nor writes anything gives nobody else a turn
                self._metrics.queue_latency.observe(self._queue.late_s)
                with logs.about(*key), self._metrics.reconcile_duration.time():
                    await self._one(key)

    async def _wait(self) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(self._queue.wait_s(time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _one(self, key: JobKey) -> None:
        self._metrics.reconciles.inc()
        try:
            again_s = await self._reconcile(key)
        except ApiError as exc:
            self._failed(exc)
            wait_s = self._queue.failed(key, time.monotonic(), exc.retry_after_s)
            log.warning("reconcile failed, reconcile again in %.1f s: %s", wait_s, exc)
        except Exception as exc:
            self._failed(exc)
            wait_s = self._queue.failed(key, time.monotonic())
            log.exception("reconcile failed, reconcile again in %.1f s", wait_s)
        else:
            self._queue.done(key, time.monotonic(), self._again(again_s))
        self._changed.set()

    def _failed(self, error: Exception) -> None:
        code = error.code if isinstance(error, ApiError) else None
        self._metrics.reconcile_errors.labels(error_kind(code).value).inc()

    def _again(self, again_s: float | None) -> float | None:
        """After how many seconds a job is looked at without an event; None: it is gone."""
        if again_s == NEVER:
            return None
        return min(self._resync_s, self._resync_s if again_s is None else max(LEAST_S, again_s))
