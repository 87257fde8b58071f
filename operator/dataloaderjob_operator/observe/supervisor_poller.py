"""The poller of the supervisors. It asks the supervisor of each job with a ready head for its status, and sends it the
number of feeders in the spec.

Each poll opens a connection to the address of the head's pod. No name is resolved, and no other head can answer. The
poller keeps the last status (`decide.supervisor_status`). It queues a job when the job's own status would change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from pydantic import ValidationError

from dataloaderjob.api.status import LoaderStatus
from dataloaderjob.core import keys, sockets, supervision
from dataloaderjob.core.certificates import files
from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.generations import Schedule
from dataloaderjob.core.handshake import CONTROL, ClientHandshake
from dataloaderjob.core.input_bound import judge
from dataloaderjob.core.keys import KeyOf, Part
from dataloaderjob.core.opening import Prove, prover
from dataloaderjob.core.seals import Seals
from dataloaderjob.core.texts import clean
from dataloaderjob.core.tls import MAX_PREAMBLE_NBYTES, check_preamble, load, new_context, refusal
from dataloaderjob_operator import names
from dataloaderjob_operator.decide import pinned, supervisor_status
from dataloaderjob_operator.decide.observed import METRICS_EVERY_S, SupervisorStatus, has_condition, leaving
from dataloaderjob_operator.objects.settings import SUPERVISOR_PORT
from dataloaderjob_operator.observe.cache import Cache, JobKey

log = logging.getLogger(__name__)

PERIOD_S = 10.0
POLLS_PER_S = 60
"""Maximum number of polls of settled supervisors per second, over all jobs. With more than 600 jobs, each supervisor is
polled less often."""
UNSETTLED_PERIOD_S = 4.0
"""Seconds between polls while feeders are starting, or after a trainer has failed."""
MIN_INTERVAL_S = 2.0
"""Minimum interval in seconds between two polls of one supervisor, even if its job changes more often."""
TIMEOUT_S = 5.0
MAX_MISSES = 3
"""Number of consecutive unanswered polls after which a supervisor counts as silent. A single restart is therefore not
reported."""
TICK_S = 0.5
MAX_CONCURRENT = 64
"""Maximum number of concurrent polls. Each poll takes 0.5 ms of CPU time."""
METRICS_PER_S = 2
"""Maximum number of metrics-only reconciles per second, over all jobs. With more than 120 jobs, each job's metrics are
written less often than once a minute."""
RATES_SPAN_S = 8.0
"""Minimum time span over which rates are computed. Over a shorter span, single batches would dominate."""
MAX_STATUS_NBYTES = 1024 * 1024
"""Maximum size of a status. A brief status of 1,000 sidecars takes 400 KB. Supervisors run in users' images, so this
limits how much of the operator's time and memory they can use."""
MAX_ANSWER_NBYTES = 64 * 1024
"""Maximum size of the one-line answer to a request that sets the number of feeders."""
LARGE_NBYTES = 64 * 1024
"""Size above which answers are parsed one at a time, in a thread."""
MAX_KEPT_NBYTES = 32 * 1024 * 1024
"""Maximum memory for the counters of all jobs' sidecars."""
MAX_WHY = 1000
HUNG_S = 180.0
"""Seconds of silence after which a supervisor that has answered before counts as hung, while its pod is ready."""
MAX_SILENT = 0.1
"""Maximum share of all supervisors that may be silent for any of them to count as hung. If more are silent, the likely
cause is the operator's own connection. A single silent supervisor may always count as hung."""

_jitter = random.Random()  # noqa: S311  spreads polls, no secret


@dataclass(frozen=True, slots=True)
class Head:
    """The address of a job's supervisor, with the job's name and key for the handshake."""

    address: str
    job: str
    key: bytes
    seed: bytes = b""
    """The secret from which the job's certificates are derived, if the job uses TLS."""

    @property
    def keys(self) -> KeyOf:
        return keys.of_job(self.key)


@dataclass(frozen=True, slots=True)
class _Status:
    """The parsed parts of a supervisor's answer."""

    status: SupervisorStatus
    readings: bytes
    """The sidecars' counters, packed."""


@dataclass(slots=True)
class _Job:
    wanted: int
    ends: bool = False
    """True if the supervisor must end all feeders because the job has ended."""
    certificates: Schedule | None = None
    """The schedule of the job's certificates; None if the job does not use TLS."""
    context: tuple[int, ssl.SSLContext] | None = None
    """The last used generation, and its TLS context, which takes 27 KB."""
    due: float = 0.0
    polled_at: float = float("-inf")
    busy: bool = False
    woken: bool = False
    """True if the job or its pods changed during a poll."""
    head: Head | None = None
    misses: int = 0
    status: SupervisorStatus | None = None
    answered_at: float | None = None
    """The time of the last answer from this head's supervisor; None if it has never answered."""
    base: tuple[float, bytes] | None = None
    """The start of the current span of rates: the time, and the packed counters at that time."""
    rates: supervision.Rates | None = None
    judged: tuple[str, int] | None = None
    """The last verdict for which the job was queued: the limit, and the recommended number of feeders. None if it is
    unknown."""
    moved_at: float = float("-inf")
    """The time at which the job was last queued only for its metrics."""


class SupervisorPoller:
    """The poller of the supervisors of all jobs. `run` polls until it is cancelled."""

    def __init__(
        self, cache: Cache, root_key: bytes, changed: Callable[[JobKey], None], *, port: int = SUPERVISOR_PORT,
        previous_root: bytes | None = None,
    ) -> None:  # fmt: skip
        """`previous_root`: the root key of jobs that started before `root_key` replaced it."""
        self._cache, self._changed, self._port = cache, changed, port
        self._roots = (root_key, previous_root)
        self._jobs: dict[JobKey, _Job] = {}
        self._gate = asyncio.Semaphore(MAX_CONCURRENT)
        self._doubted = asyncio.Semaphore(MAX_CONCURRENT // 2)
        self._large = asyncio.Semaphore(1)
        self._moved: dict[JobKey, None] = {}
        """Jobs with changed metrics, in the order in which they are queued."""
        self._moves = 0.0
        """The number of jobs in `_moved` that may be queued now."""

    def status(self, key: JobKey) -> SupervisorStatus | None:
        """Returns the last status; None if none has arrived since the head became ready."""
        return self._jobs[key].status if key in self._jobs else None

    def want(
        self, key: JobKey, feeders: int | None, certificates: Schedule | None = None, *, ends: bool = False
    ) -> None:
        """Sets the number of feeder processes to keep; None if the job has no supervisor to poll. `certificates`: the
        schedule of the job's certificates, if it uses TLS. `ends`: True if the job has ended, and the supervisor must
        end all feeders immediately."""
        if feeders is None:
            self._jobs.pop(key, None)
        elif key not in self._jobs:
            self._jobs[key] = _Job(feeders, ends, certificates)
        elif (job := self._jobs[key]) and (job.wanted, job.ends) != (feeders, ends):
            job.wanted, job.ends = feeders, ends
            self.wake(key)

    def wake(self, key: JobKey) -> None:
        """Schedules an early poll of a supervisor, because the job or its pods have changed."""
        if (job := self._jobs.get(key)) is not None:
            job.due = min(job.due, job.polled_at + MIN_INTERVAL_S)
            job.woken = job.busy

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                for key, job in list(self._jobs.items()):
                    if job.due <= time.monotonic() and not job.busy and self._find_head(key, job):
                        job.busy = True
                        group.create_task(self._one(key, job))
                self._release_moved()
                await asyncio.sleep(TICK_S)

    def _release_moved(self) -> None:
        self._moves = min(METRICS_PER_S, self._moves + METRICS_PER_S * TICK_S)
        while self._moves >= 1.0 and self._moved:
            key = next(iter(self._moved))
            del self._moved[key]
            if (job := self._jobs.get(key)) is not None:
                self._moves -= 1.0
                job.moved_at = time.monotonic()
                job.judged = _judged(job)
                self._changed(key)

    def _find_head(self, key: JobKey, job: _Job) -> bool:
        """Checks whether there is a head to poll. A new head resets what is known about the job."""
        head = self._head(key)
        if head != job.head:
            had_status = job.status is not None
            job.context = None
            job.head, job.status, job.misses, job.base, job.rates = head, None, 0, None, None
            job.answered_at = None
            if had_status:
                self._changed(key)
        if head is None:
            job.due = time.monotonic() + MIN_INTERVAL_S
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
        root, certificates = self._root(key, uid), self._jobs[key].certificates
        seed = b"" if certificates is None else names.certificate_seed(root, uid)
        return Head(max(ready), names.unique(*key, uid), names.job_key(root, uid), seed)

    def _root(self, key: JobKey, uid: str) -> bytes:
        """Returns the root key from which the keys of a job's pods are derived."""
        current, previous = self._roots
        secret = pinned.with_keys(key[1], lambda child: self._cache.child(key, child))
        if previous is not None and secret == names.key_secret(key[1], uid, previous):
            return previous
        return current

    async def _one(self, key: JobKey, job: _Job) -> None:
        async with self._turn(job):
            head, job.polled_at = job.head, time.monotonic()
            assert head is not None  # noqa: S101  _meets
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    received: _Status | str = await _exchange(head, self._port, job, self._large)
            except TimeoutError:
                received = (
                    f"no answer within {TIMEOUT_S:g} s from {sockets.address_text(head.address, self._port)}"
                )
            except EOFError:
                received = "it closed the connection"
            except (OSError, DataLoaderJobError) as exc:
                received = str(exc)
            except Exception as exc:
                log.exception("%s/%s: the supervisor's answer is unusable", *key)
                received = f"its answer is unusable: {exc!r}"
        job.busy = False
        if self._jobs.get(key) is not job or job.head != head:
            return  # the job has ended since, or has another head
        if isinstance(received, _Status):
            self._received(key, job, received.status, received.readings)
        else:
            self._missed(key, job, received)
        if job.woken:
            job.woken, job.due = False, min(job.due, job.polled_at + MIN_INTERVAL_S)

    @contextlib.asynccontextmanager
    async def _turn(self, job: _Job) -> AsyncIterator[None]:
        """Waits for a place among the concurrent polls. Supervisors that did not answer their last poll share half of
        the places."""
        async with self._doubted if job.misses else contextlib.nullcontext(), self._gate:
            yield

    def _keep(self, job: _Job, now: float, readings: bytes) -> None:
        """Begins a new span for rates. If the counters of all jobs take too much memory, a job that uses more than its
        share gets no rates."""
        job.base = None
        kept = sum(len(other.base[1]) for other in self._jobs.values() if other.base is not None)
        if kept + len(readings) <= MAX_KEPT_NBYTES or len(readings) <= MAX_KEPT_NBYTES // len(self._jobs):
            job.base = now, readings

    def _received(self, key: JobKey, job: _Job, status: SupervisorStatus, readings: bytes) -> None:
        now, before = time.monotonic(), job.status
        if job.base is None:
            self._keep(job, now, readings)
        elif (span_s := now - job.base[0]) >= RATES_SPAN_S:
            earlier, latest = (supervisor_status.unpack(packed) for packed in (job.base[1], readings))
            job.rates = supervision.between(earlier, latest, span_s)
            self._keep(job, now, readings)
        if before is not None and before.silent:
            log.info("%s/%s: the supervisor responds again", *key)
        job.status, job.misses, job.answered_at = replace(status, rates=job.rates), 0, now
        settled = status.ready == status.desired == job.wanted and status.failure is None
        period_s = max(PERIOD_S, len(self._jobs) / POLLS_PER_S)
        job.due = now + _jitter.uniform(0.9, 1.1) * (
            period_s if settled and status.ray.version else UNSETTLED_PERIOD_S
        )
        if job.ends and not status.ended:
            job.due = now + MIN_INTERVAL_S
        if before is None or status != replace(before, rates=None):
            self._changed(key)
        elif (
            job.rates
            and now - job.moved_at >= METRICS_EVERY_S
            and (_judged(job) != job.judged or self._notable(key, job.rates))
        ):
            self._moved[key] = None

    def _missed(self, key: JobKey, job: _Job, why: str) -> None:
        job.misses, why = job.misses + 1, clean(why, MAX_WHY)
        job.due = time.monotonic() + UNSETTLED_PERIOD_S
        if job.misses < MAX_MISSES:
            return
        if job.status is not None and job.status.silent:  # reported only once, even if the reason changes
            if not job.status.hung and self._hangs(job):
                log.warning("%s/%s: the supervisor is hung; replacing its pod", *key)
                job.status = replace(job.status, hung=True)
                self._changed(key)
            return
        log.warning("%s/%s: the supervisor does not respond: %s", *key, why)
        job.status, job.base, job.rates = SupervisorStatus(silent=why), None, None
        self._changed(key)

    def _hangs(self, job: _Job) -> bool:
        silent = sum(other.status is not None and bool(other.status.silent) for other in self._jobs.values())
        if job.answered_at is None or silent > max(1.0, MAX_SILENT * len(self._jobs)):
            return False
        return time.monotonic() - job.answered_at >= HUNG_S

    def _notable(self, key: JobKey, found: supervision.Rates) -> bool:
        try:
            written = LoaderStatus.model_validate(self._cache.live_status(key).get("loader") or {})
        except ValidationError:
            return True
        return supervisor_status.notable(written, supervisor_status.loader_status(found))


def _judged(job: _Job) -> tuple[str, int] | None:
    verdict = judge(job.status.measures) if job.status is not None else None
    return None if verdict is None else (verdict.limit, verdict.feeders)


async def _exchange(head: Head, port: int, job: _Job, large: asyncio.Semaphore) -> _Status:
    """Receives a supervisor's status. Sends the wanted number of feeders if the supervisor keeps a different number.

    Raises OSError, EOFError, DataLoaderJobError.
    """
    reader, writer = await asyncio.open_connection(head.address, port)
    try:
        if job.certificates is not None:
            prove = prover(head.keys, role="control", name="operator", protocol=CONTROL.newest)
            await _set_up_tls(reader, writer, _context(head, job, job.certificates), prove)
        transport = sockets.TCP if job.certificates is None else sockets.TLS
        handshake = ClientHandshake(
            head.keys, role="control", name="operator", job=head.job, transport=transport
        )
        while not handshake.done:
            writer.write(handshake.receive(await reader.readexactly(handshake.wanted)))
        seals = handshake.seals
        writer.write(sockets.pack_message({"type": "status", "brief": True}, seals))
        found = await _receive_status(reader, large, seals)
        request = {"type": "end"} if job.ends else {"type": "scale", "feeders": job.wanted}
        if found.status.desired != job.wanted or (job.ends and not found.status.ended):
            writer.write(sockets.pack_message(request, seals))
            answer = sockets.parse_message(await _receive(reader, MAX_ANSWER_NBYTES, seals))
            if answer.get("type") != "ok":
                log.warning("the supervisor refused %s: %s", request, answer.get("message"))
        return found
    finally:
        if job.certificates is None:
            writer.close()
        else:  # closing TLS would wait for the peer
            writer.transport.abort()


async def _set_up_tls(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext, prove: Prove
) -> None:
    """Answers the challenge of a new connection, and starts TLS on it. Raises OSError, EOFError, AuthError."""
    nbytes = sockets.length_of(await reader.readexactly(sockets.LENGTH.size), MAX_PREAMBLE_NBYTES)
    if challenge := check_preamble(await reader.readexactly(nbytes)):
        writer.write(prove(challenge))
    try:
        await writer.start_tls(context, server_hostname=Part.SUPERVISOR.host)
    except ssl.SSLError as exc:
        raise refusal(exc) from exc


def _context(head: Head, job: _Job, certificates: Schedule) -> ssl.SSLContext:
    """Returns the operator's TLS context for a job. It has the certificates of the current generation."""
    generation = certificates.current(datetime.now(UTC))
    if job.context is None or job.context[0] != generation:
        found = files(head.seed, Part.OPERATOR, generation, certificates)
        made = new_context(ssl.PROTOCOL_TLS_CLIENT)
        made.load_verify_locations(cadata=found.authorities.decode())
        load(made, found.certificate, found.key)
        job.context = generation, made
    return job.context[1]


async def _receive_status(
    reader: asyncio.StreamReader, large: asyncio.Semaphore, seals: Seals | None
) -> _Status:
    """Receives a status. Returns only its parsed parts, so that the message is not kept during the rest of the
    exchange."""
    data = await _receive(reader, MAX_STATUS_NBYTES, seals)
    if len(data) <= LARGE_NBYTES:
        return _parse(data)
    async with large:
        return await asyncio.to_thread(_parse, data)


def _parse(data: bytes) -> _Status:
    supervisor_status.check_shape(data)
    message = sockets.parse_message(data)
    readings = supervisor_status.pack(supervisor_status.readings(message))
    return _Status(supervisor_status.parse(message), readings)


async def _receive(reader: asyncio.StreamReader, most: int, seals: Seals | None) -> bytes:
    nbytes = sockets.open_head(await reader.readexactly(sockets.head_nbytes(seals)), most, seals)
    return sockets.open_rest(await reader.readexactly(nbytes), seals)
