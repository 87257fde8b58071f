"""B14: the cost of a ticket in the dispatcher alone, by the number of feeders: no socket, no pool, no trainer.

A rank keeps its window full, each feeder has all the tickets that it may have, and bodies arrive in the order of the
requests. A ticket's cost covers all work of the state machine for it: request, body, publication, and end of its lease.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from dataloaderjob.core import frames
from dataloaderjob.core.frames import FROM_RECEIVER, FrameKind, Header
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.dispatch.instructions import Connect, Publish, Send
from dataloaderjob.sidecar.dispatch.streams import Endpoint

NBYTES = 100_000
BUNDLE = bytes(16)
MAKE_S = 0.05
"""Virtual time of a batch. A feeder has two tickets if batches take longer than `choose.QUICK_S`."""
SMOKE = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    feeders: int
    tickets: int
    smoke: bool = False

    @property
    def name(self) -> str:
        return f"{self.feeders} feeders"

    @property
    def count(self) -> int:
        return max(8 * self.feeders, int(self.tickets * SMOKE)) if self.smoke else self.tickets


class Driver:
    """Simulated feeders that answer at once, and a trainer that releases each batch."""

    def __init__(self, feeders: int) -> None:
        self.window = 2 * feeders + 16
        self.machine = Dispatcher(LoaderSettings(shared_memory_nbytes=2 * (self.window + 8) * NBYTES))
        self.asked: deque[tuple[str, Header]] = deque()
        self.published, self.now, self.drawn = 0, 0.0, 0
        self.order = hashlib.blake2b(digest_size=8)
        self.machine.set_feeders(0.0, [Endpoint(f"feeder-{n}", f"i{n}", "h", n) for n in range(feeders)])
        self.machine.open_stream(1, manifest=b"{}", bundle=BUNDLE, facts={}, window=self.window)
        self.work()
        self._draw(self.window)

    def _draw(self, count: int) -> None:
        entries = [(self.drawn + n, b"") for n in range(count)]
        self.drawn += count
        self.machine.tickets(self.now, 1, entries, self.published)
        self.work()

    def work(self) -> None:
        while instructions := self.machine.take():
            for item in instructions:
                if type(item) is Send:
                    header = frames.unpack_header(item.header, FROM_RECEIVER)
                    if header.kind == FrameKind.TICKET:
                        self.asked.append((item.instance, header))
                elif type(item) is Publish:
                    self.published += 1
                    self.order.update(item.ticket.to_bytes(8, "little"))
                    self.machine.leases_ended(self.now, [item.lease])
                elif type(item) is Connect:
                    self.machine.feeder_up(0.0, item.endpoint.instance, {})

    def turn(self) -> None:
        """Delivers one body and draws one more ticket."""
        instance, header = self.asked.popleft()
        self.now += MAKE_S
        body = header._replace(kind=FrameKind.BODY, nbytes=NBYTES, room=0, load=1)
        if self.machine.begin_body(self.now, instance, body) is None:  # the first bodies have no room yet
            self.machine.frame(
                self.now, instance, body._replace(kind=FrameKind.ANNOUNCE, nbytes=0, room=NBYTES), b""
            )
            self.work()
            self.machine.begin_body(self.now, instance, body)
        self.machine.end_body(self.now, instance, body)
        self.work()
        self._draw(1)


def measure(case: Case) -> dict[str, Any]:
    driver = Driver(case.feeders)
    for _ in range(4 * case.feeders):
        driver.turn()
    before, began = driver.published, time.thread_time()
    for _ in range(case.count):
        driver.turn()
    cpu_s = time.thread_time() - began
    if driver.published - before != case.count:
        raise RuntimeError(f"{case.count} batches must be published, found {driver.published - before}")
    proof = {"batches": case.count, "nbytes": case.count * NBYTES, "digest": driver.order.hexdigest()}
    return {"figures": {case.name: {"cpu_us": 1e6 * cpu_s / case.count}}, "proof": proof}
