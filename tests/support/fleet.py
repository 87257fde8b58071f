"""Many ranks and many feeders in virtual time: the dispatcher of each rank, and feeders that all of them share.

The network takes no time and loses nothing; feeders make one batch at a time, ranks in turns. For what only shows at a
scale that no test machine has. `world` has faults, and one rank.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dataloaderjob.core import frames
from dataloaderjob.core.frames import FROM_FEEDER, FROM_RECEIVER, FrameKind
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import Announce, Instruction, Send, Task
from dataloaderjob.sidecar.dispatch import overseer
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.dispatch.instructions import Connect, Publish
from dataloaderjob.sidecar.dispatch.instructions import Send as SendFrame
from dataloaderjob.sidecar.dispatch.streams import Endpoint

BUNDLE = bytes(16)
STREAM = 1
UNGRANTED = 2
LATENCY_S = 0.0005


@dataclass
class Feeder:
    """The real machine of a feeder, with one builder."""

    endpoint: Endpoint
    machine: Feeding
    building: bool = False
    made: int = 0
    most_nbytes: int = 0
    """Most that was built and not sent at a time."""


@dataclass
class Rank:
    """A trainer that takes its batches in order, `step_s` apart."""

    number: int
    machine: Dispatcher
    ready: dict[int, int] = field(default_factory=dict)
    """Ticket to lease."""
    taken: int = 0
    asked: int = 0
    askings: list[str] = field(default_factory=list)
    """Instances of the feeders that were asked, in order."""


class Fleet:
    """`run` until each rank has taken `batches`."""

    def __init__(
        self, ranks: int, feeders: int, *, batches: int, window: int = 16, nbytes: int = 1 << 20, make_s: float = 0.05,
        step_s: float = 0.0, most_nbytes: int = 1 << 30,
    ) -> None:  # fmt: skip
        self.now, self.batches, self.window, self.nbytes = 0.0, batches, window, nbytes
        self.make_s, self.step_s = make_s, step_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        endpoints = [Endpoint(f"feeder-{n}", f"i{n}", "h", n) for n in range(feeders)]
        self.feeders = {e.instance: Feeder(e, Feeding(UNGRANTED, most_nbytes)) for e in endpoints}
        room = 2 * (window + 8) * nbytes
        self.ranks = [
            Rank(n, Dispatcher(LoaderSettings(shared_memory_nbytes=room), rank=n)) for n in range(ranks)
        ]
        for feeder in self.feeders.values():
            feeder.machine.bundle_ready(BUNDLE)
            for rank in self.ranks:
                feeder.machine.opened(rank.number)
        for rank in self.ranks:
            rank.machine.set_feeders(0.0, endpoints)
            rank.machine.open_stream(STREAM, manifest=b"{}", bundle=BUNDLE, facts={}, window=window)
            self._carry_out(rank)
            self._ask(rank, window)
            self._take(rank)
        self._at(overseer.TICK_S, self._tick)

    @property
    def done(self) -> bool:
        return all(rank.taken == self.batches for rank in self.ranks)

    def run(self, limit_s: float = 600.0) -> None:
        while not self.done:
            self.step()
            assert self.now < limit_s, (
                f"{[rank.taken for rank in self.ranks]} after {limit_s} virtual seconds"
            )

    def step(self) -> None:
        """The next event."""
        self.now, _, action = heapq.heappop(self._events)
        action()

    def asked_of(self, first: int) -> Counter[str]:
        """How often each feeder was asked for one of the first tickets of each rank."""
        return Counter(itertools.chain.from_iterable(rank.askings[:first] for rank in self.ranks))

    def _at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), action))

    def _tick(self) -> None:
        for rank in self.ranks:
            overseer.tick(rank.machine, self.now)
            self._carry_out(rank)
        self._at(overseer.TICK_S, self._tick)

    # Ranks

    def _ask(self, rank: Rank, count: int) -> None:
        numbers = range(rank.asked, min(self.batches, rank.asked + count))
        rank.asked = max(rank.asked, numbers.stop)
        rank.machine.tickets(self.now, STREAM, [(n, b"") for n in numbers], rank.taken, waiting=True)
        self._carry_out(rank)

    def _take(self, rank: Rank) -> None:
        if rank.taken == self.batches:
            return
        lease = rank.ready.pop(rank.taken, None)
        if lease is None:
            self._at(0.002, lambda: self._take(rank))
            return
        rank.taken += 1
        rank.machine.leases_ended(self.now, [lease])
        self._ask(rank, 1)
        self._at(self.step_s, lambda: self._take(rank))

    def _carry_out(self, rank: Rank) -> None:
        pending = deque(rank.machine.take())
        while pending:
            item = pending.popleft()
            if isinstance(item, Connect):
                rank.machine.feeder_up(self.now, item.endpoint.instance, {})
            elif isinstance(item, SendFrame):
                header = frames.unpack_header(item.header, FROM_RECEIVER)
                if header.kind == FrameKind.TICKET:
                    rank.askings.append(item.instance)
                feeder = self.feeders[item.instance]
                self._at(LATENCY_S, lambda f=feeder, h=header: self._to_feeder(rank, f, h))  # type: ignore[misc]
            elif isinstance(item, Publish):
                rank.ready[item.ticket] = item.lease
            pending.extend(rank.machine.take())

    # Feeders

    def _to_feeder(self, rank: Rank, feeder: Feeder, header: frames.Header) -> None:
        machine, about = feeder.machine, {"stream": STREAM, "ticket": header.ticket}
        made: list[Instruction] = []
        if header.kind == FrameKind.TICKET:
            made = machine.ticket(rank.number, **about, bundle=BUNDLE, flags=0, room=header.room, payload=b"")
        elif header.kind == FrameKind.GRANT:
            made = machine.grant(rank.number, **about, room=header.room)
        elif header.kind == FrameKind.CANCEL:
            made = machine.cancel(rank.number, **about)
        self._perform(feeder, made)

    def _perform(self, feeder: Feeder, made: list[Instruction]) -> None:
        feeder.most_nbytes = max(feeder.most_nbytes, feeder.machine.built_nbytes)
        for instruction in made:
            task = instruction.task
            rank = self.ranks[task.receiver]
            if isinstance(instruction, Send):
                feeder.machine.started(task)
                self._at(LATENCY_S, lambda t=task, r=rank: self._body(feeder, r, t))  # type: ignore[misc]
            elif isinstance(instruction, Announce):
                header = self._header(feeder, FrameKind.ANNOUNCE, task, room=task.nbytes)
                self._at(LATENCY_S, lambda h=header, r=rank: self._frame(feeder, r, h))  # type: ignore[misc]
        if not feeder.building and (task := feeder.machine.next_build(lambda _: True)) is not None:
            feeder.building = True
            self._at(self.make_s, lambda: self._built(feeder, task))

    def _built(self, feeder: Feeder, task: Task) -> None:
        feeder.building, feeder.made = False, feeder.made + 1
        self._perform(feeder, feeder.machine.built(task, self.nbytes))

    def _header(
        self, feeder: Feeder, kind: FrameKind, task: Task, *, nbytes: int = 0, room: int = 0
    ) -> frames.Header:
        data = frames.pack_header(
            kind, stream=STREAM, ticket=task.ticket, nbytes=nbytes, room=room,
            load=feeder.machine.load,
        )  # fmt: skip
        return frames.unpack_header(data, FROM_FEEDER)

    def _frame(self, feeder: Feeder, rank: Rank, header: frames.Header) -> None:
        rank.machine.frame(self.now, feeder.endpoint.instance, header, b"")
        self._carry_out(rank)

    def _body(self, feeder: Feeder, rank: Rank, task: Task) -> None:
        header, instance = (
            self._header(feeder, FrameKind.BODY, task, nbytes=task.nbytes),
            feeder.endpoint.instance,
        )
        if rank.machine.begin_body(self.now, instance, header) is not None:
            rank.machine.end_body(self.now, instance, header)
        feeder.machine.sent(task)
        self._carry_out(rank)
        self._perform(feeder, [])
