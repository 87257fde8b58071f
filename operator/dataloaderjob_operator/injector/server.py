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
from http import HTTPStatus

import prometheus_client
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from dataloaderjob.api import KIND
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.connections import TIMEOUT_S, Connections, peer_of, served
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
from dataloaderjob_operator.monitoring import CONTENT_TYPE, MAX_LINE_NBYTES, PortTaken, about_job

log = logging.getLogger(__name__)

PREFIX = "dataloaderjob_injector"
MAX_CONNECTIONS = 256
"""A connection with TLS takes 0.3 MB."""
MAX_NBYTES = 2 * 1024**2
"""Maximum size of a review. etcd stores objects of at most 1.5 MiB. A parsed review takes up to 30 times its size."""
MAX_BUFFERED, SMALL = 8 * 1024**2, 64 * 1024
"""Maximum size of all reviews that are being received or answered, in bytes. Beyond it, only reviews that are smaller
than SMALL are accepted. Of larger ones, only one is parsed at a time."""
MAX_HEADERS = 32
IDLE_S = 120.0
"""Seconds for which a connection stays open after an answer. The API server itself closes unused connections after
90 s, and so sends no review on a connection that is being closed."""
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
    _buffered: int = 0
    """Bytes of the reviews that are being received or answered."""
    _large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    async def review(self, request: web.Request) -> web.Response:
        """Handles a request from the API server."""
        body = bytearray()
        try:
            await self._receive(request, body)
            async with self._large if len(body) > SMALL else contextlib.nullcontext():
                return await self._respond(body)
        except ConnectionError:  # the peer has gone
            return web.Response(status=400)
        finally:
            self._buffered -= len(body)

    async def _respond(self, body: bytearray) -> web.Response:
        started = time.monotonic()
        try:
            review = read_review(json.loads(body))
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

    async def _receive(self, request: web.Request, body: bytearray) -> None:
        """Appends a request's body to `body`. Raises HTTPRequestEntityTooLarge and HTTPServiceUnavailable."""
        async for chunk in request.content.iter_any():
            body += chunk
            self._buffered += len(chunk)
            if len(body) > MAX_NBYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_NBYTES, len(body))
            if self._buffered > MAX_BUFFERED and len(body) > SMALL:
                raise web.HTTPServiceUnavailable(text="other reviews use all memory: try again\n")

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
    """Serves an application on all addresses, on a limited number of connections. Yields the port. Raises PortTaken."""
    runner = web.AppRunner(
        app, access_log=None, max_line_size=MAX_LINE_NBYTES, max_field_size=MAX_LINE_NBYTES, max_headers=MAX_HEADERS,
        keepalive_timeout=IDLE_S, handler_cancellation=True, shutdown_timeout=DEADLINE_S,
    )  # fmt: skip
    connections = Connections(MAX_CONNECTIONS)

    @web.middleware
    async def watched(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Gives each request a deadline of its own, and the time until the next request another."""
        loop = asyncio.get_running_loop()
        found = None if request.transport is None else request.transport.get_extra_info("peername")
        if found is None:
            return await handler(request)
        is_success, peer = False, peer_of(found)
        connections.began(peer, loop.time() + DEADLINE_S + TIMEOUT_S)
        try:
            response = await handler(request)
            is_success = response.status == HTTPStatus.OK
            return response
        finally:
            connections.answered(peer, loop.time() + IDLE_S, is_success=is_success)

    app.middlewares.append(watched)
    await runner.setup()
    assert runner.server is not None  # noqa: S101  it is set up
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        try:
            found = await stack.enter_async_context(
                served(port, runner.server, tls=context, connections=connections, drain=runner.cleanup)
            )
        except OSError as exc:
            raise PortTaken(f"cannot serve on port {port}: {exc.strerror or exc}") from exc
        yield found


def webhook(injector: Injector) -> web.Application:
    app = web.Application()
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
