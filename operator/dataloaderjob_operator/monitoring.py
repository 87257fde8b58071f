"""The operator's log, metrics and probes. Each log line about a job has the job's name, namespace, uid and generation.
docs/reference/metrics.md is generated from the metrics.

The event loop that does the work also serves /healthz, /readyz and /metrics. If the loop hangs, none of them answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from dataloaderjob.api import KIND
from dataloaderjob.api.status import Phase
from dataloaderjob.core.logs import MAX_TRACEBACK_CHARS, LineFormatter
from dataloaderjob.core.texts import clean, clean_lines
from dataloaderjob_operator.connections import served

OF_KOPF = ("k8s_ref", "k8s_skip", "settings")
"""Attributes that kopf adds to log records. `settings` is one of kopf's own objects."""
_LINES = ("exc_info", "stack_info")
"""Fields of log records that may contain several lines."""
_ABOUT: ContextVar[Mapping[str, object] | None] = ContextVar("about", default=None)
PREFIX = "dataloaderjob_operator"
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of histogram buckets, in seconds. A reconcile that writes nothing takes milliseconds. With a slow API
server, a reconcile can take minutes."""
WITHOUT_WATCHES_S = 300.0
"""Seconds for which a watch may be closed while kopf tries to reach the API server. After that, the process should be
restarted."""
PULSE_S = 1.0
MAX_LINE_NBYTES = 4096
"""Maximum size of a request's first line, and of a header. A probe sends a few hundred bytes."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class LogFormat(StrEnum):
    JSON = "json"
    TEXT = "text"


@contextlib.contextmanager
def about_job(namespace: str, job: str) -> Iterator[None]:
    """Marks all log records inside the context as concerning this job."""
    token = _ABOUT.set({"job": job, "namespace": namespace})
    try:
        yield
    finally:
        _ABOUT.reset(token)


def add_log_fields(**fields: object) -> None:
    """Adds fields to all later log records inside the context of `about_job`."""
    _ABOUT.set({**(_ABOUT.get() or {}), **fields})


def configure_logging(kind: LogFormat) -> None:
    """Sends the output of all loggers, including kopf's, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(log_formatter(kind))
    handler.addFilter(mark_record)
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.captureWarnings(True)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # otherwise each event of a watch is logged


def log_formatter(kind: LogFormat) -> logging.Formatter:
    if kind is LogFormat.TEXT:
        return _TextFormatter("%(levelname)s %(name)s: %(message)s")
    return _JsonFormatter(
        "%(levelname)s %(name)s %(message)s", rename_fields={"levelname": "level", "name": "logger"},
        timestamp="time", reserved_attrs=[*RESERVED_ATTRS, *OF_KOPF],
    )  # fmt: skip


class _JsonFormatter(JsonFormatter):
    """A formatter that writes records as JSON. It shortens and cleans text from other sources."""

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        for name, value in log_data.items():
            if isinstance(value, str):
                log_data[name] = clean_lines(value, MAX_TRACEBACK_CHARS) if name in _LINES else clean(value)
        return super().process_log_record(log_data)


class _TextFormatter(LineFormatter):
    """A formatter that appends the job's name in brackets."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        job = getattr(record, "job", None)
        text = super().formatMessage(record)
        return text if job is None else f"{text} [{getattr(record, 'namespace', '')}/{job}]"


def mark_record(record: logging.LogRecord) -> bool:
    """Adds to a log record the job or other object that the record concerns. Always returns True, because this filter
    drops no records."""
    fields: dict[str, object] = dict(_ABOUT.get() or {})
    ref = getattr(record, "k8s_ref", None)
    if isinstance(ref, Mapping):
        if ref.get("kind") == KIND:
            fields |= {"job": ref.get("name"), "namespace": ref.get("namespace"), "uid": ref.get("uid")}
        else:
            fields["object"] = f"{ref.get('kind')} {ref.get('namespace')}/{ref.get('name')}"
    for name, value in fields.items():
        if not hasattr(record, name):
            setattr(record, name, value)
    return True


class ErrorKind(StrEnum):
    """Kinds of errors that make a reconcile fail."""

    UNREACHABLE = "unreachable"
    """The API server did not answer."""
    CONFLICT = "conflict"
    """An object of the same name exists, or the object has changed since it was read (409)."""
    REFUSED = "refused"
    """The API server would refuse the same request again (400, 403, 422)."""
    GONE = "gone"
    """The object to write does not exist (404)."""
    THROTTLED = "throttled"
    """Too many requests (429)."""
    SERVER = "server"
    """The API server failed (5xx)."""
    OTHER = "other"
    """The API server answered with another error code."""
    BUG = "bug"
    """The operator itself failed; the log has the traceback."""


BY_CODE = {
    0: ErrorKind.UNREACHABLE, 400: ErrorKind.REFUSED, 403: ErrorKind.REFUSED, 404: ErrorKind.GONE,
    409: ErrorKind.CONFLICT, 422: ErrorKind.REFUSED, 429: ErrorKind.THROTTLED,
}  # fmt: skip


def error_kind(code: int | None) -> ErrorKind:
    """Classifies the status code of a response. The code is None if the error did not come from the API server."""
    if code is None:
        return ErrorKind.BUG
    return ErrorKind.SERVER if code >= 500 else BY_CODE.get(code, ErrorKind.OTHER)


class Metrics:
    """The operator's metrics, in their own registry."""

    def __init__(self) -> None:
        made = self.registry = CollectorRegistry()
        counter = partial(Counter, namespace=PREFIX, registry=made)
        gauge = partial(Gauge, namespace=PREFIX, registry=made)
        histogram = partial(Histogram, namespace=PREFIX, registry=made, buckets=SECONDS)
        self.reconciles = counter("reconciles", "Reconciles of a job.")
        self.reconcile_errors = counter("reconcile_errors", "Failed reconciles, by kind of error.", ["kind"])
        self.reconcile_duration = histogram(
            "reconcile_duration_seconds", "Duration of a reconcile, including its writes."
        )
        self.queue_depth = gauge(
            "queue_depth",
            "Jobs that are due for a reconcile and waiting for a worker. If this stays above 0, raise "
            "--workers.",
        )
        self.queue_latency = histogram(
            "queue_latency_seconds", "Time that jobs waited for a worker after becoming due."
        )
        self.api_writes = counter(
            "api_writes",
            "Writes sent to the API server. An idle job causes none.",
            ["kind", "verb"],
        )
        self.event_lookups = counter(
            "event_lookups", "Requests for the events of one object, sent only while a job is held up."
        )
        self.loop_lag = gauge(
            "loop_lag_seconds", "Delay of the event loop's last wake-up, measured every second."
        )
        self.watches = gauge(
            "watches",
            "Open watches: one for each kind of object, or one for each kind and namespace if --namespace "
            "is given. A watch whose last request failed does not count.",
        )
        self.statuses_unwritten = gauge(
            "statuses_unwritten",
            "Jobs whose last status write failed, so that kubectl shows an outdated status for them.",
        )
        self.leader = gauge(
            "leader",
            "Leadership: 1 for the operator that holds the Lease, 0 for one on standby.",
        )
        self.build = Info("build", "Version of the operator; always 1.", namespace=PREFIX, registry=made)
        ProcessCollector(namespace=PREFIX, registry=made)
        self._received: dict[str, float] = {}

    def received(self, kind: str) -> None:
        """Records that a watch reported an object of this kind."""
        self._received[kind] = time.monotonic()

    def describe(
        self,
        *,
        version: str,
        kopf: str,
        phases: Callable[[], Mapping[str, int]],
        loaders: Callable[[], Iterable[tuple[tuple[str, str], Mapping[str, object]]]],
    ) -> None:
        """Adds the metrics that depend on other parts of the operator. Must be called only once."""
        self.build.info({"version": version, "kopf": kopf, "python": platform.python_version()})
        self.registry.register(_State(phases, loaders, self._received))
        prometheus_client.disable_created_metrics()

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)


class _State(Collector):
    """Metrics that are computed when they are collected."""

    def __init__(
        self,
        phases: Callable[[], Mapping[str, int]],
        loaders: Callable[[], Iterable[tuple[tuple[str, str], Mapping[str, object]]]],
        received: Mapping[str, float],
    ) -> None:
        self._phases, self._loaders, self._received = phases, loaders, received

    def collect(self) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily(f"{PREFIX}_jobs", "DataLoaderJobs by phase.", labels=["phase"])
        found = self._phases()
        for phase in Phase:
            jobs.add_metric([phase.value], found.get(phase.value, 0))
        yield jobs
        yield from self._verdicts()
        ages = GaugeMetricFamily(
            f"{PREFIX}_watch_event_age_seconds",
            "Time since a watch last delivered an event. It grows while nothing happens.",
            labels=["kind"],
        )
        now = time.monotonic()
        for kind, moment in sorted(self._received.items()):
            ages.add_metric([kind], now - moment)
        yield ages

    def _verdicts(self) -> Iterator[GaugeMetricFamily]:
        labels = ["dataloaderjob_namespace", "dataloaderjob_name"]
        bound = GaugeMetricFamily(
            f"{PREFIX}_job_input_bound_ratio",
            "Share of each step that a job's training spends waiting for input, as in its status.",
            labels=labels,
        )
        replicas = GaugeMetricFamily(
            f"{PREFIX}_job_recommended_replicas",
            "Recommended number of a job's feeder pods, as in its status.",
            labels=labels,
        )
        for key, loader in self._loaders():
            if loader.get("limit"):
                bound.add_metric(list(key), _number(loader.get("inputBoundPercent")) / 100)
                replicas.add_metric(list(key), _number(loader.get("recommendedReplicas")))
        yield bound
        yield replicas


def _number(found: object) -> float:
    try:
        return float(found) if isinstance(found, str | int | float) else 0.0
    except ValueError:
        return 0.0


class PortTaken(Exception):
    """The operator cannot listen on the port."""


@dataclass(slots=True)
class ProcessHealth:
    """Liveness and readiness of the process. Callers pass the time, in seconds of any clock."""

    watches: Callable[[], int]
    """A function that returns the number of open watches."""
    expected: int
    """The number of watches that should be open."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Tasks that must never end."""
    remark: Callable[[], str] = str
    """A function that describes other problems, which do not justify a restart of the process; empty if there are
    none."""
    listed: bool = False
    """True once all objects have been listed and the operator makes decisions."""
    stands_by: bool = False
    """True while another operator is active and this one is ready to take over."""
    _full_at: float | None = None

    def not_alive(self, now: float) -> str:
        """Returns the reason to restart the process; empty if there is none."""
        for task in self.tasks:
            if task.done():
                return f"the task {task.get_name()} has ended"
        open_ = self.watches()
        if not self.listed or self._full_at is None or open_ >= self.expected:
            self._full_at = now
        missing_s = now - self._full_at
        if missing_s > WITHOUT_WATCHES_S:
            return f"only {open_} of {self.expected} watches have been open for {missing_s:.0f} s"
        return ""

    def not_ready(self) -> str:
        ready = self.listed or self.stands_by
        return "" if ready else "the initial list is not complete"


async def pulse(metrics: Metrics) -> None:
    """Measures the delay of the event loop until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PULSE_S
        await asyncio.sleep(PULSE_S)
        metrics.loop_lag.set(max(0.0, loop.time() - due))


@contextlib.asynccontextmanager
async def serve(port: int, metrics: Metrics, health: ProcessHealth) -> AsyncIterator[None]:
    """Serves metrics and probes on all addresses, or nothing if `port` is 0. Raises PortTaken."""
    if port == 0:
        yield
        return
    runner = web.AppRunner(
        _app(metrics, health), access_log=None, max_line_size=MAX_LINE_NBYTES, max_field_size=MAX_LINE_NBYTES
    )
    await runner.setup()
    try:
        assert runner.server is not None  # noqa: S101  it is set up
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(served(port, runner.server))
            except OSError as exc:
                why = exc.strerror or exc
                raise PortTaken(f"cannot serve metrics and probes on port {port}: {why}") from exc
            yield
    finally:
        await runner.cleanup()


def _app(metrics: Metrics, health: ProcessHealth) -> web.Application:
    def answer(why: str, remark: str = "") -> web.Response:
        text = "\n".join(filter(None, (why or "ok", remark)))
        return _last(web.Response(status=503 if why else 200, text=f"{text}\n"))

    async def healthz(_: web.Request) -> web.Response:
        return answer(health.not_alive(asyncio.get_running_loop().time()), health.remark())

    async def readyz(_: web.Request) -> web.Response:
        return answer(health.not_ready())

    async def exposition(_: web.Request) -> web.Response:
        return _last(web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE}))

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)]
    )
    return app


def _last(response: web.Response) -> web.Response:
    """Makes the server close the connection after the response. kopf waits for all tasks of this event loop before it
    exits."""
    response.force_close()
    return response
