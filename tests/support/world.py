"""A simulated world around the dispatcher: feeders, a trainer and a clock, all virtual.

Bodies are not bytes here but owners: memory maps each extent to the ticket whose bytes lie there, so an
overlap, a use after free or a batch from the wrong place is seen at once.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

from dataloaderjob.core import frames
from dataloaderjob.core.frames import FROM_RECEIVER, FrameKind
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.sidecar.dispatch import overseer
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.dispatch.instructions import (
    Close,
    Connect,
    CreateRegion,
    Discard,
    DropRegion,
    End,
    Fail,
    Note,
    Publish,
    Released,
    Replace,
    SayThere,
    Send,
    Snapshot,
    Unpublish,
)
from dataloaderjob.sidecar.dispatch.streams import Endpoint, Extent

UNGRANTED = 2
HUNG_S, ALIVE_S = 5.0, 5.0
"""As `feeder.builders` and `feeder.server` have them."""


@dataclass
class SimFeeder:
    endpoint: Endpoint
    pace_s: float
    frozen: bool = False
    dead: bool = False
    hung: set[int] = field(default_factory=set)
    queue: list = field(default_factory=list)
    built: dict = field(default_factory=dict)
    building: tuple | None = None
    unloadable: bool = False
    """User code cannot be loaded there."""
    load_s: float = 0.005
    """What that takes."""
    made: int = 0
    refused: int = 0
    """Tickets for which user code could not be loaded."""
    released: list[bytes] = field(default_factory=list)


class World:
    """`run` until every stream is consumed or the time is up."""

    def __init__(
        self, seed: int = 0, *, limit: int = 1 << 24, pool: int | None = None, deadline_s: float = 300.0,
        awaits_feeders: bool = False,
    ):  # fmt: skip
        self.random = random.Random(seed)
        self.now = 0.0
        self.machine = Dispatcher(
            LoaderSettings(
                shared_memory_nbytes=limit,
                pool_nbytes=pool,
                batch_deadline_s=deadline_s,
                awaits_feeders=awaits_feeders,
            ),
        )
        self.feeders: dict[str, SimFeeder] = {}
        self.listed: list[Endpoint] = []
        self.events: list = []
        self.order = itertools.count()
        self.regions: dict[int, int] = {}
        self.memory: dict[tuple[int, int], tuple] = {}
        self.index: dict[tuple[int, int], tuple] = {}
        self.failed: dict[tuple[int, int], bytes] = {}
        self.there: set[tuple[int, int]] = set()
        self.notes: list[str] = []
        self.replaced: list[tuple[str, str]] = []
        self.sizes: dict[tuple[int, int], int] = {}
        self.taken: dict[int, list[int]] = {}
        self.waits: list[float] = []
        self.receiving: dict[str, tuple] = {}
        self.serial = itertools.count()
        self.replace = False
        self.lease_limit = 0
        self.deadly: set[tuple[int, int]] = set()
        """Tickets that end the feeder that makes them."""
        self.poison: set[tuple[int, int]] = set()
        """Tickets that end the builder that makes them."""
        self.hungry: set[tuple[int, int]] = set()
        """Those among them that end it for want of memory."""
        self.at(0.05, self._tick)
        self.at(ALIVE_S, self._alive)

    def at(self, delay: float, action) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), action))

    def _alive(self) -> None:
        for feeder in self.feeders.values():
            if feeder.building and not feeder.frozen:
                self._frame(feeder, FrameKind.ALIVE, feeder.building[0])
        self.carry_out()
        self.at(ALIVE_S, self._alive)

    def _tick(self) -> None:
        overseer.tick(self.machine, self.now)
        self.carry_out()
        self.at(overseer.TICK_S, self._tick)

    def run(self, until, limit_s: float = 600.0) -> None:
        while not until():
            when, _, action = heapq.heappop(self.events)
            assert when < limit_s, f"not done after {limit_s} virtual seconds: {self.story()}"
            self.now = when
            action()
            self.carry_out()
            self.check()

    def story(self) -> str:
        rows = []
        for stream in self.machine.streams.values():
            for n in sorted(stream.tickets):
                t = stream.tickets[n]
                rows.append(
                    f"{stream.id}/{n} {t.state.value} {[(a.feeder.endpoint.name, a.state.value) for a in t.attempts]}"
                )
        return (
            "; ".join(rows[:40])
            + f" feeders {[(k, x.up, x.suspect_since, len(x.attempts)) for k, x in self.machine.feeders.items()]}"
        )

    # Feeders

    def add_feeder(self, pace_s: float = 0.01, name: str | None = None) -> SimFeeder:
        n = next(self.serial)
        endpoint = Endpoint(name or f"feeder-{n}", f"i{n}", "h", n)
        feeder = SimFeeder(endpoint, pace_s)
        self.feeders[endpoint.instance] = feeder
        self.listed.append(endpoint)
        self.machine.set_feeders(self.now, list(self.listed))
        return feeder

    def unlist(self, feeder: SimFeeder) -> None:
        self.listed.remove(feeder.endpoint)
        self.machine.set_feeders(self.now, list(self.listed))

    def kill(self, feeder: SimFeeder) -> None:
        feeder.dead = True
        self.receiving.pop(feeder.endpoint.instance, None)
        self.machine.feeder_down(self.now, feeder.endpoint.instance, "killed")
        if feeder.endpoint in self.listed:
            self.unlist(feeder)

    def _up(self, feeder: SimFeeder) -> None:
        if not feeder.dead and not feeder.frozen and feeder.endpoint.instance in self.machine.feeders:
            feeder.queue, feeder.built, feeder.building = [], {}, None
            self.machine.feeder_up(self.now, feeder.endpoint.instance, {})

    def _to_feeder(self, feeder: SimFeeder, header) -> None:
        if feeder.dead:
            return
        if feeder.frozen:
            self.at(0.5, lambda: self._to_feeder(feeder, header))
            return
        key = (header.stream, header.ticket)
        if header.kind == FrameKind.TICKET:
            feeder.queue.append((key, header.room, bool(header.flags & frames.Flag.PROBE)))
            self._build(feeder)
        elif header.kind == FrameKind.GRANT and key in feeder.built:
            feeder.built.pop(key)
            self._body(feeder, key)
            self._build(feeder)
        elif header.kind == FrameKind.GRANT:  # asked again after its announcement: it is room
            feeder.queue = [
                (k, max(room, header.room) if k == key else room, probe) for k, room, probe in feeder.queue
            ]
            if feeder.building and feeder.building[0] == key:
                feeder.building = (key, max(feeder.building[1], header.room))
        elif header.kind == FrameKind.CANCEL:
            feeder.queue = [q for q in feeder.queue if q[0] != key]
            feeder.built.pop(key, None)
            if feeder.building and feeder.building[0] == key and key[1] in feeder.hung:
                # its builder is ended after a grace
                self.at(HUNG_S, lambda: self._builder_ended(feeder, key))
            else:
                self.at(0.001, lambda: self._frame(feeder, FrameKind.CANCELLED, key))
            self._build(feeder)
        elif header.kind == FrameKind.RELEASE:
            feeder.released.append(header.bundle)

    def _builder_ended(self, feeder: SimFeeder, key) -> None:
        if feeder.building and feeder.building[0] == key:
            feeder.building = None
        self._frame(feeder, FrameKind.CANCELLED, key)
        self._build(feeder)

    def _build(self, feeder: SimFeeder) -> None:
        if feeder.building or not feeder.queue or len(feeder.built) >= UNGRANTED:
            return
        key, room, probe = feeder.queue.pop(0)
        feeder.building = (key, room)
        if probe:
            self.at(0.0, lambda: self._frame(feeder, FrameKind.PROGRESS, key, room=3))
        if key in self.deadly:
            self.at(0.005, lambda: self.kill(feeder))
            return
        if key in self.poison:
            self.at(0.005, lambda: self._lost(feeder, key))
            return
        if feeder.unloadable:
            feeder.building = None
            feeder.refused += 1
            self.at(
                feeder.load_s, lambda: self._frame(feeder, FrameKind.FAILED, key, flags=frames.Flag.ELSEWHERE)
            )
            self.at(feeder.load_s, lambda: self._build(feeder))
            return
        if key[1] in feeder.hung:
            return
        self.at(feeder.pace_s * self.random.uniform(0.5, 1.5), lambda: self._finished(feeder, key))

    def _lost(self, feeder: SimFeeder, key) -> None:
        """The process that made it ended; the feeder has another one."""
        feeder.building = None
        self._frame(
            feeder, FrameKind.LOST, key, room=4, flags=frames.Flag.MEMORY if key in self.hungry else 0
        )
        self._build(feeder)

    def _finished(self, feeder: SimFeeder, key) -> None:
        if feeder.dead:
            return
        if feeder.frozen:
            self.at(0.5, lambda: self._finished(feeder, key))
            return
        room = feeder.building[1]
        feeder.building = None
        feeder.made += 1
        if self.sizes[key] <= room:
            self._body(feeder, key)
        else:
            feeder.built[key] = room
            self._frame(feeder, FrameKind.ANNOUNCE, key, room=self.sizes[key])
        self._build(feeder)

    def _header(self, kind, key, *, nbytes=0, room=0, flags=0):
        data = frames.pack_header(kind, stream=key[0], ticket=key[1], nbytes=nbytes, room=room, flags=flags)
        return frames.unpack_header(data, frames.FROM_FEEDER)

    def _frame(self, feeder: SimFeeder, kind, key, *, room=0, flags=0) -> None:
        state = self.machine.feeders.get(feeder.endpoint.instance)
        if not feeder.dead and state is not None and state.up:
            header = self._header(kind, key, room=room, flags=flags)
            self.machine.frame(self.now, feeder.endpoint.instance, header, b"why")

    def _body(self, feeder: SimFeeder, key) -> None:
        """Bodies of one feeder come one after the other."""
        instance = feeder.endpoint.instance
        if instance in self.receiving:
            self.at(0.001, lambda: None if feeder.dead else self._body(feeder, key))
            return
        state = self.machine.feeders.get(instance)
        if feeder.dead or state is None or not state.up:
            return
        header = self._header(FrameKind.BODY, key, nbytes=self.sizes[key])
        extent = self.machine.begin_body(self.now, instance, header)
        self.receiving[instance] = (header, extent)
        if extent is not None:
            self._write(extent, ("filling", key, instance))
        self.at(self.random.uniform(0, 0.003), lambda: self._body_end(feeder, header))

    def _body_end(self, feeder: SimFeeder, header) -> None:
        instance = feeder.endpoint.instance
        if feeder.dead or self.receiving.get(instance, (None,))[0] is not header:
            return
        if feeder.frozen:
            self.at(0.5, lambda: self._body_end(feeder, header))
            return
        _, extent = self.receiving.pop(instance)
        if extent is not None:
            key = (header.stream, header.ticket)
            assert self.memory[extent.region, extent.offset] == ("filling", key, instance)
            self._write(extent, ("whole", key))
            self.machine.end_body(self.now, instance, header)

    def _write(self, extent: Extent, what: tuple) -> None:
        assert extent.offset + extent.nbytes <= self.regions[extent.region], "an extent leaves its region"
        self.memory[extent.region, extent.offset] = what

    # Instructions

    def carry_out(self) -> None:
        while instructions := self.machine.take():
            for item in instructions:
                self._do(item)

    def _do(self, item) -> None:
        match item:
            case Send(instance, header, payload):
                decoded = frames.unpack_header(header, FROM_RECEIVER)
                assert decoded.nbytes == len(payload)
                feeder = self.feeders[instance]
                self.at(0.0005, lambda: self._to_feeder(feeder, decoded))
            case Publish(lease, stream, ticket, extent, nbytes):
                assert self.memory[extent.region, extent.offset] == ("whole", (stream, ticket))
                assert nbytes == self.sizes[stream, ticket] <= extent.nbytes
                self.index[stream, ticket] = (lease, extent)
            case Unpublish(stream, ticket):
                del self.index[stream, ticket]
            case Fail(stream, ticket, payload, _):
                self.failed[stream, ticket] = payload
            case End(stream, ticket, batches):
                self.failed[stream, ticket] = frames.pack_end(batches)
            case SayThere(stream, ticket):
                self.there.add((stream, ticket))
            case CreateRegion(region, nbytes, _, lease_limit):
                self.regions[region] = nbytes
                self.lease_limit = lease_limit
            case DropRegion(region):
                del self.regions[region]
            case Connect(endpoint):
                feeder = self.feeders[endpoint.instance]
                self.at(0.01, lambda: self._up(feeder))
            case Close(instance, _, again):
                self.receiving.pop(instance, None)
                if again:
                    feeder = self.feeders[instance]
                    self.at(0.1, lambda: self._retry(feeder))
            case Discard(instance):
                header, _ = self.receiving[instance]
                self.receiving[instance] = (header, None)
            case Released() | Snapshot():
                pass
            case Note(text):
                self.notes.append(text)
            case Replace(endpoint, reason, _):
                self.replaced.append((endpoint.name, reason))
                if self.replace:
                    old = self.feeders[endpoint.instance]
                    self.at(1.0, lambda: self._replace(old))
            case _:
                raise AssertionError(item)

    def _replace(self, old: SimFeeder) -> None:
        """What the supervisor does with a feeder that hangs."""
        if not old.dead:
            self.kill(old)
            self.add_feeder(old.pace_s, old.endpoint.name).hung |= old.hung

    def _retry(self, feeder: SimFeeder) -> None:
        if feeder.dead or feeder.endpoint.instance not in self.machine.feeders:
            return
        if feeder.frozen:
            self.at(0.5, lambda: self._retry(feeder))
        else:
            self._up(feeder)

    # Invariants

    def check(self) -> None:
        placer = self.machine.placer
        spans: dict[int, list[tuple[int, int]]] = {}
        for region, arena in placer.space.arenas.items():
            assert self.regions[region] == arena.nbytes
            spans[region] = sorted((o, o + n) for o, n in arena.used.items())
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans[region])), "extents overlap"
            free = sum(n for _, n in arena._free)
            assert free + arena.used_nbytes == arena.nbytes, "bytes of a region are lost"

    # The trainer

    def open(
        self,
        stream: int,
        total: int,
        *,
        window: int = 8,
        size=lambda r: 4096 * 3,
        step_s: float = 0.0,
        hold: int = 1,
    ):
        """A trainer that takes `total` batches in order, each held for `hold` more steps."""
        self.machine.open_stream(stream, manifest=b"{}", bundle=bytes(16), facts={}, window=window)
        trainer = SimTrainer(self, stream, total, window, size, step_s, hold)
        self.taken[stream] = []
        for _ in range(window):
            trainer.draw()
        self.at(0.0, trainer.next)
        return trainer


class SimTrainer:
    def __init__(self, world, stream, total, window, size, step_s, hold):
        self.world, self.stream, self.total = world, stream, total
        self.size, self.step_s, self.hold = size, step_s, hold
        self.drawn = 0
        self.held: list[int] = []
        self.done = False
        self.paused = False
        self.told: int | None = None
        self.held_nbytes = 0
        self.last: tuple | None = None
        self.asked_at: float | None = None

    def draw(self) -> None:
        if self.drawn < self.total:
            world, number = self.world, self.drawn
            world.sizes[self.stream, number] = self.size(world.random)
            self.drawn += 1
            awaited = len(world.taken[self.stream])
            world.machine.tickets(world.now, self.stream, [(number, b"")], awaited)

    def next(self) -> None:
        world = self.world
        if self.done:
            return
        number = len(world.taken[self.stream])
        key = (self.stream, number)
        if self.asked_at is None:
            self.asked_at = world.now
        ready = key in world.index or key in world.failed
        if not self.paused and not ready and self.told != number:
            self.told = number
            world.machine.tickets(world.now, self.stream, [], number, waiting=True)
        if self.paused or not ready:
            world.at(0.002, self.next)
            return
        world.waits.append(world.now - self.asked_at)
        self.asked_at = None
        if key in world.index:
            lease, extent = world.index.pop(key)
            assert world.memory[extent.region, extent.offset] == ("whole", key), (
                "a lent batch was overwritten"
            )
            self.held.append(lease)
            self.held_nbytes += extent.nbytes
            if self.held_nbytes > world.lease_limit:  # copied
                self.check_and_end(lease, extent, key)
            elif self.hold >= 0:
                world.at(self.step_s * self.hold + 0.001, lambda: self.check_and_end(lease, extent, key))
            else:  # as `for batch in loader`: the variable holds a batch until the next one is there
                if self.last is not None:
                    self.check_and_end(*self.last)
                self.last = (lease, extent, key)
        world.taken[self.stream].append(number)
        self.draw()
        if number + 1 == self.total:
            self.done = True
            if self.last is not None:
                self.check_and_end(*self.last)
            world.machine.close_stream(world.now, self.stream, self.total)
        else:
            world.at(self.step_s, self.next)

    def check_and_end(self, lease, extent, key) -> None:
        world = self.world
        assert world.memory[extent.region, extent.offset] == ("whole", key), "a lent batch was overwritten"
        self.held.remove(lease)
        self.held_nbytes -= extent.nbytes
        world.machine.leases_ended(world.now, [lease])

    def stop(self) -> None:
        """`break`: the iterator is collected."""
        if self.last is not None and not self.done:
            last, self.last = self.last, None
            self.check_and_end(*last)
        if not self.done:
            self.done = True
            self.world.machine.close_stream(self.world.now, self.stream, len(self.world.taken[self.stream]))
