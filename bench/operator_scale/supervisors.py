"""Supervisors of all jobs at one port of all addresses, because each pod's address is on this machine.

They report the requested number of feeders, all of them ready, and sidecars that receive at a known rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import zlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dataloaderjob.core import handshake, keys, sockets
from dataloaderjob.core.errors import AuthError, DataLoaderJobError, RemoteProtocolError
from dataloaderjob.core.seals import Seals
from dataloaderjob_operator import names

BATCH_NBYTES = 38_535_168
POOL_NBYTES = 256 * 1024 * 1024
SIDECARS = 2
SWING, SWING_PERIOD_S = 0.25, 60.0
"""Amplitude and period of a moving rate."""
STALL = 0.04
MAX_NBYTES = 64 * 1024
RAY = {
    "version": "2.60.0", "worker_register_timeout_seconds": 300, "health_check_period_ms": 3000,
    "health_check_timeout_ms": 10000, "health_check_failure_threshold": 5,
}  # fmt: skip
"""Ray's settings, as reported by a GCS."""


class Mode(StrEnum):
    """Ways in which the sidecars' figures change."""

    STEADY = "steady"
    """Each job has its own constant rate."""
    MOVING = "moving"
    """Each job's rate rises and falls by a quarter within a minute, at its own time."""


@dataclass(slots=True)
class Job:
    """The state of one supervisor. Callers pass the time, in seconds of one clock."""

    name: str
    desired: int
    mode: Mode = Mode.STEADY
    born: float = 0.0
    at: float = 0.0
    batches: float = 0.0
    """Number of batches of each of its sidecars."""
    rate: float = field(init=False)
    phase: float = field(init=False)

    def __post_init__(self) -> None:
        number = zlib.crc32(self.name.encode())
        self.rate, self.phase = 5.0 + number % 40, number % 1000 / 1000
        self.at = self.born

    def go_on(self, now: float) -> None:
        turn = 2 * math.pi * (now / SWING_PERIOD_S + self.phase)
        factor = 1.0 + (SWING * math.sin(turn) if self.mode is Mode.MOVING else 0.0)
        self.batches += self.rate * factor * (now - self.at)
        self.at = now

    def status(self) -> dict[str, Any]:
        """Returns a status message in the format of `core.supervision`."""
        return {
            "type": "status", "pid": 1, "up_seconds": self.at - self.born, "desired": self.desired,
            "ready": self.desired, "notes": [], "failures": [], "ray": RAY,
            "feeders": [self._feeder(number) for number in range(self.desired)],
            "sidecars": {f"sidecar-{n}": {"metrics": self._figures(), "receivers": 1} for n in range(SIDECARS)},
        }  # fmt: skip

    def _feeder(self, number: int) -> dict[str, Any]:
        return {
            "name": f"feeder-{number}", "state": "ready", "seconds": self.at - self.born, "cause": "", "why": "",
            "host": f"127.64.0.{number}", "instance": f"{number:032x}", "port": 40000 + number, "pid": 100 + number,
            "node": f"{number:056x}", "session": "session_1",
        }  # fmt: skip

    def _figures(self) -> dict[str, int]:
        elapsed_ns = (self.at - self.born) * 1e9
        return {
            "next_calls": int(self.batches), "nbytes": int(self.batches) * BATCH_NBYTES,
            "wait_ns": int(STALL * elapsed_ns), "step_ns": int((1 - STALL) * elapsed_ns),
            "retries": 0, "hedges": 0, "late_copies": 0, "failures": 0, "feeders_lost": 0, "copies": 0,
            "used_nbytes": POOL_NBYTES * 3 // 5, "pool_nbytes": POOL_NBYTES,
        }  # fmt: skip


class Supervisors:
    """All supervisors, by the names of their jobs."""

    def __init__(self, root_key: bytes, *, feeders: int) -> None:
        """`feeders`: each supervisor's number of feeders until it receives another."""
        self._root_key, self._feeders, self._mode = root_key, feeders, Mode.STEADY
        self.jobs: dict[str, Job] = {}

    def set_mode(self, mode: Mode) -> None:
        self._mode = mode
        for job in self.jobs.values():
            job.go_on(time.monotonic())
            job.mode = mode

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> Any:
        """Yields the port. Raises OSError if it is taken."""
        server = await asyncio.start_server(self._connection, host, port, backlog=1024)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, DataLoaderJobError):
            job, seals = await self._welcome(reader, writer)
            while True:
                answer = self._answer(job, await _receive(reader, seals))
                writer.write(sockets.pack_message(answer, seals))
        writer.close()

    async def _welcome(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Job, Seals | None]:
        """Performs the accepting side of the handshake. Raises AuthError for a peer without the job's key."""
        first = handshake.new_challenge()
        writer.write(sockets.pack_message(first))
        hello = await _receive(reader, None)
        name = str(hello.get("job"))
        try:
            uid = name.rpartition("/")[2]
            found = keys.of_job(names.job_key(self._root_key, uid))
            facts = {handshake.TRANSPORT: sockets.TCP}
            last = handshake.accept_answer(found, first, hello, job=name, facts=facts)
        except (AuthError, ValueError) as exc:
            writer.write(sockets.pack_message({"error": str(exc)}))
            raise
        writer.write(sockets.pack_message(last))
        seals = handshake.seals_after(found, first, hello, accepted=True)
        now = time.monotonic()
        return self.jobs.setdefault(name, Job(name, self._feeders, self._mode, now)), seals

    def _answer(self, job: Job, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("type") == "scale":
            job.desired = int(message["feeders"])
            return {"type": "ok"}
        if message.get("type") != "status":
            raise RemoteProtocolError(f"{message.get('type')!r} is not asked of these supervisors")
        job.go_on(time.monotonic())
        return job.status()


async def _receive(reader: asyncio.StreamReader, seals: Seals | None) -> dict[str, Any]:
    nbytes = sockets.open_head(await reader.readexactly(sockets.head_nbytes(seals)), MAX_NBYTES, seals)
    return sockets.parse_message(sockets.open_rest(await reader.readexactly(nbytes), seals))
