"""A keyed queue of jobs that are due for a reconcile, and the loop that reconciles a few of them at a time. The queue
is pure: callers pass the time.

A key that is added twice is taken once. A key that is added while it is being processed is taken again only afterwards.
A key waits longer each time that its processing fails. An event shortens the wait to EVENT_WAIT_S, because it may have
removed the cause.

Jobs that a user changed go first, and the number of other jobs being processed is limited. The API server then answers
ten times as fast as under 32 concurrent requests.

A single loop takes the keys. If workers took them, each key would wake all waiting workers.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from dataloaderjob.core.processes import Backoff
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.monitoring import Metrics, about_job, error_kind
from dataloaderjob_operator.observe.cache import JobKey

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

BACKOFF = Backoff(0.5, 60.0)
EVENT_WAIT_S = 5.0
RESYNC_S = 600.0
"""Maximum number of seconds between reconciles of an idle job."""
MIN_INTERVAL_S = 0.05
"""Minimum number of seconds between two reconciles of a job, even if the job requests less."""
FOLLOWING = 8
"""Number of places for keys that do not go first, or a quarter of all places if that is more. Keys that go first have
their own places, so users' changes do not hold up other keys."""
NEVER = float("inf")
Reconcile = Callable[[JobKey], Awaitable[float | None]]
"""A function that reconciles a job once. It returns the seconds until the next reconcile; None if none is needed before
the resync, NEVER if the job is gone."""


class WorkQueue(Generic[K]):
    """Keys, each with the time at which it is due."""

    def __init__(
        self, jitter: random.Random | None = None, *, most_first: int = 24, most_following: int = FOLLOWING
    ) -> None:
        """`most_first`: how many keys that go first may be processed at the same time. `most_following`: the same for
        the other keys."""
        self._most_first, self._most_following = most_first, most_following
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0
        self._busy: dict[K, bool] = {}
        """Keys being processed. The value is True if the key went first."""
        self._following = 0
        """The number of keys being processed that did not go first."""
        self._readded: dict[K, float] = {}
        """Keys that were added while they were being processed, each with the time at which it is due."""
        self._failures: dict[K, int] = {}
        self._not_before: dict[K, float] = {}
        self._first: dict[K, None] = {}
        """Keys that go first, in the order in which they go."""
        self.latency_s = 0.0
        """Seconds for which the last taken key had been due."""
        self._jitter = jitter or random.Random()  # noqa: S311  spreads retries, no secret

    def __len__(self) -> int:
        return len(self._due) + len(self._readded)

    def add(self, key: K, now: float, after_s: float = 0.0, *, first: bool = False) -> None:
        """Makes a key due after `after_s` seconds, unless it is already due earlier. `first`: True if the key goes
        first."""
        if first:
            self._first[key] = None
        due = max(now + after_s, self._not_before.get(key, now))
        if key in self._busy:
            self._readded[key] = min(due, self._readded.get(key, due))
        elif due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._order += 1
            heapq.heappush(self._heap, (due, self._order, key))

    def take(self, now: float) -> K | None:
        """Takes a key that goes first. If no such key can be taken, takes the key that has been due longest. Returns
        None if no key is due, or enough keys are being processed."""
        if len(self._busy) - self._following < self._most_first:
            for key in self._first:
                if (due := self._due.get(key, NEVER)) <= now:
                    return self._taken(key, due, now, first=True)
        while not self._full and self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                return self._taken(key, due, now, first=False)
        return None

    def _taken(self, key: K, due: float, now: float, *, first: bool) -> K:
        del self._due[key]
        self._first.pop(key, None)
        self._busy[key] = first
        self._following += not first
        self.latency_s = now - due
        return key

    @property
    def _full(self) -> bool:
        """True if all places for keys that do not go first are in use."""
        return self._following >= self._most_following

    def backlog(self, now: float) -> int:
        """Returns the number of keys that are due but not being processed."""
        return sum(due <= now for due in self._due.values())

    def wait_s(self, now: float) -> float | None:
        """Returns the seconds until a key can be taken. Returns None if none can be taken before the next call of
        `add`, `done` or `failed`."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if self._full:
            soon = [self._due[key] for key in self._first if self._due.get(key, now) > now]
            return min(soon) - now if soon else None
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def done(self, key: K, now: float, requeue_after_s: float | None = None) -> None:
        """Records that a key was processed. `requeue_after_s`: seconds until the key is due again."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._release(key, now, requeue_after_s)

    def failed(self, key: K, now: float, at_least_s: float = 0.0) -> float:
        """Records that the processing of a key failed. Returns the seconds until the retry, which grow with each
        failure. `at_least_s`: the delay that the server requested."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        wait = max(at_least_s, BACKOFF.wait_s(count) * self._jitter.uniform(0.75, 1.25))
        self._not_before[key] = now + max(at_least_s, min(wait, EVENT_WAIT_S))
        self._release(key, now, wait)
        return wait

    def forget(self, key: K) -> None:
        """Drops the key of an object that is gone."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._due.pop(key, None)
        self._readded.pop(key, None)
        self._first.pop(key, None)

    def _release(self, key: K, now: float, after_s: float | None) -> None:
        if not self._busy.pop(key, True):
            self._following -= 1
        again = self._readded.pop(key, None)
        if again is not None:
            self.add(key, now, max(0.0, again - now))
        if after_s is not None:
            self.add(key, now, after_s)


class Workers:
    """The loop that reconciles the queued jobs, several at a time. Watches call `add`. `run` reconciles jobs until it
    is cancelled."""

    def __init__(
        self,
        reconcile: Reconcile,
        *,
        workers: int = 32,
        metrics: Metrics | None = None,
        resync_s: float = RESYNC_S,
    ) -> None:
        self._reconcile, self._resync_s = reconcile, resync_s
        following = max(1, min(workers - 1, max(FOLLOWING, workers // 4)))
        self._queue: WorkQueue[JobKey] = WorkQueue(
            most_first=max(1, workers - following), most_following=following
        )
        self._changed = asyncio.Event()
        self._metrics = metrics or Metrics()
        self._metrics.queue_depth.set_function(lambda: self._queue.backlog(time.monotonic()))

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, key: JobKey, after_s: float = 0.0, *, first: bool = False) -> None:
        self._queue.add(key, time.monotonic(), after_s, first=first)
        self._changed.set()

    def forget(self, key: JobKey) -> None:
        self._queue.forget(key)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                key = self._queue.take(time.monotonic())
                if key is None:
                    await self._wait()
                else:
                    self._metrics.queue_latency.observe(self._queue.latency_s)
                    group.create_task(self._work(key))
                    await asyncio.sleep(0)  # reconciles that never wait would starve all other tasks

    async def _work(self, key: JobKey) -> None:
        with about_job(*key), self._metrics.reconcile_duration.time():
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
            requeue_after_s = await self._reconcile(key)
        except ApiError as exc:
            self._failed(exc)
            wait_s = self._queue.failed(key, time.monotonic(), exc.retry_after_s)
            log.warning("reconcile failed, retry in %.1f s: %s", wait_s, exc)
        except Exception as exc:
            self._failed(exc)
            wait_s = self._queue.failed(key, time.monotonic())
            log.exception("reconcile failed, retry in %.1f s", wait_s)
        else:
            self._queue.done(key, time.monotonic(), self._next_s(requeue_after_s))
        self._changed.set()

    def _failed(self, error: Exception) -> None:
        code = error.code if isinstance(error, ApiError) else None
        self._metrics.reconcile_errors.labels(error_kind(code).value).inc()

    def _next_s(self, requeue_after_s: float | None) -> float | None:
        """Returns the seconds until a job is reconciled without an event; None if the job is gone."""
        if requeue_after_s == NEVER:
            return None
        return min(
            self._resync_s,
            self._resync_s if requeue_after_s is None else max(MIN_INTERVAL_S, requeue_after_s),
        )
