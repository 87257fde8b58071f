"""/healthz, /readyz and /metrics, served by the loop that does the work: if that hangs, nothing answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web

from dataloaderjob_operator.metrics import Metrics

WITHOUT_WATCHES_S = 300.0
"""A watch may be away so long, while kopf looks for the API server, before the process is better started anew."""
PULSE_S = 1.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PortTaken(Exception):
    """Nothing can be served there."""


@dataclass(slots=True)
class Health:
    """Whether the process does what it is for. Time comes in, in seconds of any clock."""

    watches: Callable[[], int]
    """How many are open."""
    expected: int
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    """Those that shall never end."""
    listed: bool = False
    """All that is there has been listed once: from then on decisions are made."""
    _full_at: float | None = None

    def not_alive(self, now: float) -> str:
        """Why it should be started anew; empty if it should not."""
        for task in self.tasks:
            if task.done():
                return f"the task {task.get_name()} has ended"
        open_ = self.watches()
        if not self.listed or self._full_at is None or open_ >= self.expected:
            self._full_at = now
        missing_s = now - self._full_at
        if missing_s > WITHOUT_WATCHES_S:
            return f"{open_} of {self.expected} watches are open, for {missing_s:.0f} s"
        return ""

    def not_ready(self) -> str:
        return "" if self.listed else "the first list of what is there is not done"


async def pulse(metrics: Metrics) -> None:
    """Measures by how much the loop is late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PULSE_S
        await asyncio.sleep(PULSE_S)
        metrics.loop_lag.set(max(0.0, loop.time() - due))


@contextlib.asynccontextmanager
async def serve(port: int, metrics: Metrics, health: Health) -> AsyncIterator[None]:
    """On all addresses; not at all on port 0. Raises PortTaken."""
    if port == 0:
        yield
        return
    runner = web.AppRunner(_app(metrics, health), access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, port=port).start()
        except OSError as exc:
            raise PortTaken(f"port {port} is needed for metrics and probes: {exc.strerror or exc}") from exc
        yield
    finally:
        await runner.cleanup()


def _app(metrics: Metrics, health: Health) -> web.Application:
    def answer(why: str) -> web.Response:
        return _last(web.Response(status=503 if why else 200, text=f"{why or 'ok'}\n"))

    async def healthz(_: web.Request) -> web.Response:
        return answer(health.not_alive(asyncio.get_running_loop().time()))

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
    """No connection is kept: kopf waits at its end for whatever began in this loop."""
    response.force_close()
    return response
