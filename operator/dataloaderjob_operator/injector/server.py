"""The injector's HTTPS server: admission reviews at /inject, and its metrics and probes on a port without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import datetime

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from dataloaderjob.api import KIND
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.injector.admission import (
    BadReview,
    Review,
    ReviewAnswer,
    ReviewResult,
    Setup,
    answer,
    read_review,
    response,
    unreadable,
)
from dataloaderjob_operator.monitoring import CONTENT_TYPE, PortTaken, about_job

log = logging.getLogger(__name__)

PREFIX = "dataloaderjob_injector"
MAX_NBYTES = 8 * 1024**2
"""Maximum size of a review. The API server accepts requests of up to 3 MiB, and a review may contain two objects of
that size."""
DEADLINE_S = 4.0
"""Seconds within which the job must be read. After 5 s, the API server would report only a timeout."""
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class InjectorMetrics:
    """The injector's metrics, in their own registry."""

    def __init__(self) -> None:
        made = self.registry = CollectorRegistry()
        self.admissions = Counter(
            "admissions",
            "Labeled pods, by result: injected, unchanged (already up to date, or left to another operator), refused, "
            "or failed (the job could not be read).",
            ["result"],
            namespace=PREFIX,
            registry=made,
        )
        self.duration = Histogram(
            "admission_duration_seconds", "Duration of an admission review, including the request for the job.",
            buckets=SECONDS, namespace=PREFIX, registry=made,
        )  # fmt: skip
        self.expiry = Gauge(
            "certificate_expiry_timestamp_seconds",
            "Expiry of the certificate being served, in Unix time.",
            namespace=PREFIX,
            registry=made,
        )
        ProcessCollector(namespace=PREFIX, registry=made)
        for result in ReviewResult:
            self.admissions.labels(result.value)
        prometheus_client.disable_created_metrics()

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)


@dataclass(slots=True)
class Injector:
    """The handler of admission reviews."""

    api: ApiClient
    setup: Setup
    metrics: InjectorMetrics = field(default_factory=InjectorMetrics)

    async def review(self, request: web.Request) -> web.Response:
        """Handles a request from the API server."""
        started = time.monotonic()
        try:
            review = read_review(json.loads(await request.read()))
        except (BadReview, ValueError, RecursionError) as exc:
            return web.Response(status=400, text=f"{exc}\n")
        found = await self._answer(review)
        self.metrics.admissions.labels(found.result.value).inc()
        self.metrics.duration.observe(time.monotonic() - started)
        with about_job(review.namespace, review.job or ""):
            if found.result is ReviewResult.INJECTED:
                log.info("added the sidecar to pod %s", review.name)
            elif found.message:
                log.warning("refused pod %s: %s", review.name, found.message)
        return web.json_response(response(review, found))

    async def _answer(self, review: Review) -> ReviewAnswer:
        if review.job is None:
            return ReviewAnswer(result=ReviewResult.UNCHANGED)
        try:
            async with asyncio.timeout(DEADLINE_S):
                job = await self.api.read(review.namespace, (KIND, review.job)) if review.job else None
        except TimeoutError:
            return unreadable(review, f"the API server did not answer within {DEADLINE_S:.0f} s")
        except ApiError as exc:
            return unreadable(review, str(exc))
        try:
            return answer(review, job, self.setup)
        except Exception as exc:  # a refusal with a reason is better than a dropped connection
            log.exception("cannot answer the admission review of pod %s", review.name)
            return unreadable(review, f"the injector failed ({type(exc).__name__}): see its log")


@contextlib.asynccontextmanager
async def serving(
    app: web.Application, port: int, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serves an application on all addresses. Yields the port. Raises PortTaken."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, port=port, ssl_context=context)
            await site.start()
        except OSError as exc:
            raise PortTaken(f"cannot serve on port {port}: {exc.strerror or exc}") from exc
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def webhook(injector: Injector) -> web.Application:
    app = web.Application(client_max_size=MAX_NBYTES)
    app.add_routes([web.post("/inject", injector.review)])
    return app


def probes(
    metrics: InjectorMetrics, ready: Callable[[], bool], ends: Callable[[], datetime | None]
) -> web.Application:
    """Builds the application that is served without TLS. `ends`: a function that returns the expiry of the served
    certificate."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(status=200 if ready() else 503, text="ok\n" if ready() else "not ready\n")

    async def exposition(_: web.Request) -> web.Response:
        if (end := ends()) is not None:
            metrics.expiry.set(end.timestamp())
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)]
    )
    return app
