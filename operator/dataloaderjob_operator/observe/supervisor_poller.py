"""Asks the supervisor of each job whose head is ready how the job is, and for the number of feeders in its spec.

A connection for each question, to the address of the head's pod: nothing to resolve, and no other head answers. What
came last is kept (`decide.answers`); a job is put onto the queue when its status would be another one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import ValidationError

from dataloaderjob.api.status import LoaderStatus
from dataloaderjob.core import auth, supervision
from dataloaderjob.core.errors import DataLoaderJobError, RemoteProtocolError
from dataloaderjob_operator import names
from dataloaderjob_operator.decide import answers
from dataloaderjob_operator.decide.answers import Answer
from dataloaderjob_operator.decide.observed import has_condition, leaving
from dataloaderjob_operator.objects.settings import SUPERVISOR_PORT
from dataloaderjob_operator.observe.cache import Cache, JobKey

log = logging.getLogger(__name__)

PERIOD_S = 10.0
QUICK_S = 4.0
"""While feeders are on their way, or a trainer has failed."""
SOON_S = 2.0
"""The least between two asks of a job, whatever happens to it."""
TIMEOUT_S = 5.0
MISSES = 3
"""In a row, after which a supervisor is silent: one restart of it is no news."""
TICK_S = 0.5
AT_ONCE = 64
"""One that answers takes 0.5 ms of CPU: 1000 of them 5 % of a core."""
SPAN_S = 8.0
"""The least over which rates are taken: less shows single batches."""
MAX_ANSWER_NBYTES = 1024 * 1024
"""1000 feeders and as many sidecars, with all their metrics. A supervisor is of the user's image: what it may take of
the operator's time and memory is bounded here."""

_jitter = random.Random()  # noqa: S311  spreads asks, no secret


class Supervisors(Protocol):
    """What a reconcile needs of them."""

    def __len__(self) -> int:
        """How many jobs have one."""

    def answer(self, key: JobKey) -> Answer | None:
        """What was said last, None if nothing has been since the head is ready."""

    def want(self, key: JobKey, feeders: int | None) -> None:
        """So many feeder processes from now on; None: the job has no supervisor to ask."""


@dataclass(frozen=True, slots=True)
class Head:
    """Where a job's supervisor is, and what it knows us by."""

    address: str
    job: str
    key: bytes


@dataclass(slots=True)
class _Job:
    wanted: int
    due: float = 0.0
    asked_at: float = float("-inf")
    busy: bool = False
    woken: bool = False
    """Something happened while it was asked."""
    head: Head | None = None
    misses: int = 0
    answer: Answer | None = None
    base: tuple[float, supervision.Readings] | None = None
    """Where the present span of rates begins."""
    rates: supervision.Rates | None = None


class SupervisorPoller:
    """`Supervisors` over TCP; `run` until cancelled."""

    def __init__(
        self, cache: Cache, root_key: bytes, changed: Callable[[JobKey], None], *, port: int = SUPERVISOR_PORT
    ) -> None:
        self._cache, self._root_key, self._changed, self._port = cache, root_key, changed, port
        self._jobs: dict[JobKey, _Job] = {}
        self._gate = asyncio.Semaphore(AT_ONCE)

    def __len__(self) -> int:
        return len(self._jobs)

    def answer(self, key: JobKey) -> Answer | None:
        return self._jobs[key].answer if key in self._jobs else None

    def want(self, key: JobKey, feeders: int | None) -> None:
        if feeders is None:
            self._jobs.pop(key, None)
        elif key not in self._jobs:
            self._jobs[key] = _Job(feeders)
        elif self._jobs[key].wanted != feeders:
            self._jobs[key].wanted = feeders
            self.wake(key)

    def wake(self, key: JobKey) -> None:
        """Something happened to the job or its pods: its supervisor may have news."""
        if (job := self._jobs.get(key)) is not None:
            job.due = min(job.due, job.asked_at + SOON_S)
            job.woken = job.busy

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                for key, job in list(self._jobs.items()):
                    if job.due <= time.monotonic() and not job.busy and self._meets(key, job):
                        job.busy = True
                        group.create_task(self._one(key, job))
                await asyncio.sleep(TICK_S)

    def _meets(self, key: JobKey, job: _Job) -> bool:
        """Whether there is a head to ask. Another one than before begins anew."""
        head = self._head(key)
        if head != job.head:
            had_answer = job.answer is not None
            job.head, job.answer, job.misses, job.base, job.rates = head, None, 0, None, None
            if had_answer:
                self._changed(key)
        if head is None:
            job.due = time.monotonic() + SOON_S
        return head is not None

    def _head(self, key: JobKey) -> Head | None:
        uid = self._cache.uid(key)
        ready = [
            pod["status"]["podIP"]
            for pod in self._cache.of_role(key, names.Role.HEAD)
            if not leaving(pod) and has_condition(pod, "Ready") and pod["status"].get("podIP")
        ]
        if uid is None or not ready:
            return None
        return Head(max(ready), names.unique(*key, uid), names.job_key(self._root_key, uid))

    async def _one(self, key: JobKey, job: _Job) -> None:
        async with self._gate:
            head, job.asked_at = job.head, time.monotonic()
            assert head is not None  # noqa: S101  _meets
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    message = await _converse(head, self._port, job)
                heard: Answer | str = answers.parse(message)
            except TimeoutError:
                heard = f"nothing within {TIMEOUT_S:g} s at {head.address}:{self._port}"
            except EOFError:
                heard = "it closed the connection"
            except (OSError, DataLoaderJobError) as exc:
                heard = str(exc)
            except Exception as exc:
                log.exception("%s/%s: cannot use the supervisor's answer", *key)
                heard = f"its answer is no use: {exc!r}"
        job.busy = False
        if self._jobs.get(key) is not job or job.head != head:
            return  # meanwhile it has ended, or has another head
        if isinstance(heard, Answer):
            self._heard(key, job, heard, answers.readings(message))
        else:
            self._missed(key, job, heard)
        if job.woken:
            job.woken, job.due = False, min(job.due, job.asked_at + SOON_S)

    def _heard(self, key: JobKey, job: _Job, answer: Answer, readings: supervision.Readings) -> None:
        now, before = time.monotonic(), job.answer
        if job.base is None:
            job.base = now, readings
        elif (span_s := now - job.base[0]) >= SPAN_S:
            job.rates = supervision.between(job.base[1], readings, span_s)
            job.base = now, readings
        if before is not None and before.silent:
            log.info("%s/%s: the supervisor answers again", *key)
        job.answer, job.misses = replace(answer, rates=job.rates), 0
        settled = answer.ready == answer.desired == job.wanted and answer.failure is None
        job.due = now + (PERIOD_S if settled and answer.ray.version else QUICK_S) * _jitter.uniform(0.9, 1.1)
        if job.answer != before or (job.rates is not None and self._notable(key, job.rates)):
            self._changed(key)

    def _missed(self, key: JobKey, job: _Job, why: str) -> None:
        job.misses += 1
        job.due = time.monotonic() + QUICK_S
        if job.misses < MISSES:
            return
        if job.answer is not None and job.answer.silent:
            return  # told once, with the first reason: others may follow in turns
        log.warning("%s/%s: the supervisor does not answer: %s", *key, why)
        job.answer, job.base, job.rates = Answer(silent=why), None, None
        self._changed(key)

    def _notable(self, key: JobKey, found: supervision.Rates) -> bool:
        try:
            written = LoaderStatus.model_validate(self._cache.live_status(key).get("loader") or {})
        except ValidationError:
            return True
        return answers.notable(written, answers.shown(found))


async def _converse(head: Head, port: int, job: _Job) -> Mapping[str, Any]:
    """Its status; a supervisor that keeps another number of feeders than is wanted is told the wanted one.

    Raises OSError, EOFError, DataLoaderJobError.
    """
    reader, writer = await asyncio.open_connection(head.address, port)
    try:
        handshake = auth.ClientHandshake(head.key, role="control", name="operator", job=head.job)
        while not handshake.done:
            writer.write(handshake.receive(await reader.readexactly(handshake.wanted)))
        writer.write(auth.pack_message({"type": "status"}))
        status = await _receive(reader, MAX_ANSWER_NBYTES)
        if status.get("desired") != job.wanted:
            writer.write(auth.pack_message({"type": "scale", "feeders": job.wanted}))
            answer = await _receive(reader, MAX_ANSWER_NBYTES)
            if answer.get("type") != "ok":
                log.warning(
                    "the supervisor refuses to keep %d feeders: %s", job.wanted, answer.get("message")
                )
        return status
    finally:
        writer.close()


async def _receive(reader: asyncio.StreamReader, limit: int) -> dict[str, Any]:
    (n,) = auth.LENGTH.unpack(await reader.readexactly(auth.LENGTH.size))
    if n > limit:
        raise RemoteProtocolError(f"a message of {n} bytes exceeds {limit}")
    return auth.parse_message(await reader.readexactly(n))
