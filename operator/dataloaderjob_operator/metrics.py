"""The operator's metrics for Prometheus; docs/metrics.md is generated from them."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dataloaderjob.api.status import Phase

PREFIX = "dataloaderjob_operator"
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets: a reconcile that writes nothing takes milliseconds, one that waits for a slow API server up to minutes."""


class ErrorKind(StrEnum):
    """Why a reconcile failed."""

    UNREACHABLE = "unreachable"
    """The API server did not answer."""
    CONFLICT = "conflict"
    """Something of the same name is in the way, or changed meanwhile (409)."""
    REFUSED = "refused"
    """The API server will not take it as it is (400, 403, 422)."""
    GONE = "gone"
    """What was to be written is not there (404)."""
    THROTTLED = "throttled"
    """Too many requests (429)."""
    SERVER = "server"
    """The API server failed (5xx)."""
    OTHER = "other"
    """Another answer."""
    BUG = "bug"
    """The operator itself failed; the log has the traceback."""


BY_CODE = {
    0: ErrorKind.UNREACHABLE, 400: ErrorKind.REFUSED, 403: ErrorKind.REFUSED, 404: ErrorKind.GONE,
    409: ErrorKind.CONFLICT, 422: ErrorKind.REFUSED, 429: ErrorKind.THROTTLED,
}  # fmt: skip


def error_kind(code: int | None) -> ErrorKind:
    """Of an answer of the API server; None: the error is none of it."""
    if code is None:
        return ErrorKind.BUG
    return ErrorKind.SERVER if code >= 500 else BY_CODE.get(code, ErrorKind.OTHER)


class Metrics:
    """All metrics of the operator, in a registry of their own."""

    def __init__(self) -> None:
        made = self.registry = CollectorRegistry()
        self.reconciles = Counter(f"{PREFIX}_reconciles", "Reconciles of a job.", registry=made)
        self.reconcile_errors = Counter(
            f"{PREFIX}_reconcile_errors",
            "Reconciles that failed, by kind of error.",
            ["kind"],
            registry=made,
        )
        self.reconcile_duration = Histogram(
            f"{PREFIX}_reconcile_duration_seconds", "Time that a reconcile took, its writes included.",
            buckets=SECONDS, registry=made,
        )  # fmt: skip
        self.queue_depth = Gauge(
            f"{PREFIX}_queue_depth",
            "Jobs that are due for a reconcile and wait for a worker. If it stays above 0, raise --workers.",
            registry=made,
        )
        self.queue_latency = Histogram(
            f"{PREFIX}_queue_latency_seconds", "Time that jobs waited for a worker after they were due.",
            buckets=SECONDS, registry=made,
        )  # fmt: skip
        self.api_writes = Counter(
            f"{PREFIX}_api_writes",
            "Writes sent to the API server. A job in which nothing happens causes none.",
            ["kind", "verb"],
            registry=made,
        )
        self.event_lookups = Counter(
            f"{PREFIX}_event_lookups",
            "Requests for the events of one object, made only while a job is held up.",
            registry=made,
        )
        self.loop_lag = Gauge(
            f"{PREFIX}_loop_lag_seconds",
            "How late the event loop woke up last; measured every second.",
            registry=made,
        )
        self.watches = Gauge(
            f"{PREFIX}_watches",
            "Watches that are open: seven, for each namespace where some are named.",
            registry=made,
        )
        self.build = Info(f"{PREFIX}_build", "Versions of the operator; always 1.", registry=made)
        ProcessCollector(namespace=PREFIX, registry=made)
        self._told: dict[str, float] = {}

    def told(self, kind: str) -> None:
        """A watch told of an object of this kind."""
        self._told[kind] = time.monotonic()

    def describe(self, *, version: str, kopf: str, phases: Callable[[], Mapping[str, int]]) -> None:
        """What is only known once the operator is put together; once."""
        self.build.info({"version": version, "kopf": kopf, "python": platform.python_version()})
        self.registry.register(_State(phases, self._told))
        prometheus_client.disable_created_metrics()

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)


class _State(Collector):
    """What is counted when it is asked for."""

    def __init__(self, phases: Callable[[], Mapping[str, int]], told: Mapping[str, float]) -> None:
        self._phases, self._told = phases, told

    def collect(self) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily(f"{PREFIX}_jobs", "DataLoaderJobs by phase.", labels=["phase"])
        found = self._phases()
        for phase in Phase:
            jobs.add_metric([phase.value], found.get(phase.value, 0))
        yield jobs
        ages = GaugeMetricFamily(
            f"{PREFIX}_watch_event_age_seconds",
            "Time since a watch delivered an event. It grows while nothing happens.",
            labels=["kind"],
        )
        now = time.monotonic()
        for kind, moment in sorted(self._told.items()):
            ages.add_metric([kind], now - moment)
        yield ages
