"""The receiver's protocol machine: tickets in, feeders asked, bodies placed, batches published. Pure.

Events come in by method calls with the time; what is to be done goes out as instructions. No socket,
no clock, no payload of a batch. The shell is `sidecar.receiver`; the policies are in `choose` (which
feeder), `lateness` (when is one late) and `placing` (where a batch lies); `overseer` acts on lateness.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dataloaderjob.core import failing, frames, tickets
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import Flag, Header, Kind
from dataloaderjob.sidecar.dispatch import choose, granting
from dataloaderjob.sidecar.dispatch.instructions import (
    Close,
    Connect,
    Counters,
    Discard,
    DispatchSettings,
    Endpoint,
    Fail,
    Instruction,
    Note,
    Publish,
    Released,
    Send,
)
from dataloaderjob.sidecar.dispatch.lateness import MAX_LOADS, MAX_STRIKES
from dataloaderjob.sidecar.dispatch.placing import Placer, mb
from dataloaderjob.sidecar.dispatch.space import Extent
from dataloaderjob.sidecar.dispatch.streams import Attempt, AttemptState, Event, Link, State, Stream, Ticket
from dataloaderjob.sidecar.dispatch.versions import Versions


class Dispatcher:
    """The state of one pool: its streams, its links to feeders, its space."""

    def __init__(self, settings: DispatchSettings, *, generation: int) -> None:
        self.settings = settings
        self.generation = generation
        self.streams: dict[int, Stream] = {}
        self.links: dict[str, Link] = {}
        self.counters = Counters()
        self.links_lost_at: float | None = None
        self.desired_feeders: int | None = None
        self.supervisor_notes: list[str] = []
        self.starved = False
        """An announced body waits for space: the shell should hear of ended leases at once."""
        self._versions = Versions()
        self._out: list[Instruction] = []
        self.placer = Placer(settings.limit_nbytes, settings.pool_nbytes, self._out)

    def take(self) -> list[Instruction]:
        """What is to be done, in order. Call after every event."""
        out = self._out[:]
        self._out.clear()
        return out

    @property
    def busy(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._out)

    # Events from the trainer

    def open_stream(
        self,
        stream: int,
        *,
        manifest: bytes,
        bundle: bytes,
        facts: dict[str, Any],
        window: int,
        awaited: int = 0,
    ) -> None:
        made = Stream(stream, bundle, manifest, facts, window, awaited)
        self.streams[stream] = made
        for link in self.links.values():
            if link.up:
                self._compare(made, link)

    def tickets(
        self,
        now: float,
        stream_id: int,
        entries: list[tuple[int, bytes]],
        awaited: int,
        *,
        waiting: bool = False,
    ) -> None:
        """(number, payload) of new tickets. `waiting`: the trainer sleeps until `awaited` is ready.

        Raises RemoteProtocolError for a ticket of no stream or one told twice.
        """
        stream = self.streams.get(stream_id)
        for number, payload in entries:
            if stream is None or number in stream.tickets or number < stream.awaited:
                raise RemoteProtocolError(f"ticket {number} of stream {stream_id} was not expected")
            ticket = Ticket(stream, number, payload, now)
            stream.tickets[number] = ticket
            stream.enqueue(ticket)
        if stream is not None:
            self.advance(stream, awaited)
            stream.waiting_since = now if waiting else None
            if self.starved:
                self.grant(now)
        self.dispatch(now)

    def advance(self, stream: Stream, awaited: int) -> None:
        """The trainer has taken all tickets below `awaited`."""
        while stream.awaited < awaited and stream.tickets:  # it is a stranger's word: no loop without end
            stream.tickets.pop(stream.awaited, None)
            stream.awaited += 1

    def close_stream(self, now: float, stream_id: int, awaited: int) -> None:
        stream = self.streams.pop(stream_id, None)
        if stream is None:
            return
        self.advance(stream, awaited)
        for ticket in stream.tickets.values():
            for ask in ticket.asks[:]:
                self.drop_ask(ask, cancel=True)
            if ticket.lease is not None:
                self.placer.end_lease(ticket.lease)
        self._release(stream.bundle)
        self.grant(now)
        self.dispatch(now)

    def leases_ended(self, now: float, leases: Iterable[int]) -> None:
        ended = False
        for lease in leases:
            ended = self.placer.end_lease(lease) or ended
        if ended:
            self.grant(now)
            self.dispatch(now)

    def moved(self, now: float, instance: str) -> None:
        """A part of a body came in."""
        if (link := self.links.get(instance)) is not None:
            link.moved_at = now

    # Events from the supervisor and the links

    def feeders(self, now: float, endpoints: list[Endpoint]) -> None:
        """The list of feeders as it should be. A feeder that is no longer listed finishes what it has."""
        listed = {e.instance: e for e in endpoints}
        for instance, endpoint in listed.items():
            if instance not in self.links:
                self.links[instance] = Link(endpoint, now)
                self._out.append(Connect(endpoint))
            else:
                self.links[instance].draining = False
        for instance, link in list(self.links.items()):
            if instance not in listed:
                link.draining = True
                self._retire(link)
        self.dispatch(now)

    def _retire(self, link: Link) -> None:
        if link.draining and not link.asks and self.links.pop(link.endpoint.instance, None) is not None:
            self._out.append(Close(link.endpoint.instance, "no longer listed", False))

    def link_up(self, now: float, instance: str, facts: dict[str, Any]) -> None:
        link = self.links.get(instance)
        if link is None:
            return
        link.up, link.facts, link.heard_at, link.answered_at = True, facts, now, now
        link.suspect_since, link.load = None, 0
        link.refused.clear()
        link.not_loaded.clear()
        for stream in self.streams.values():
            self._compare(stream, link)
        self.dispatch(now)

    def link_down(self, now: float, instance: str, reason: str) -> None:
        """The link ended, for whatever reason. All that was asked there is asked again elsewhere."""
        link = self.links.get(instance)
        if link is None or not link.up:
            return
        link.up, link.down_since, link.replace_asked = False, now, False
        self.counters.feeders_lost += 1
        link.bundles.clear()
        for ask in list(link.asks.values()):
            self._strike(ask, reason)
        self._retire(link)
        if not any(other.up for other in self.links.values()):
            self.links_lost_at = now
        self.grant(now)
        self.dispatch(now)

    def frame(self, now: float, instance: str, header: Header, payload: bytes) -> None:
        """Any frame of a feeder but BODY. Raises RemoteProtocolError: the shell closes the link."""
        link = self.links.get(instance)
        if link is None or header.generation != self.generation:
            return
        self._heard(now, link, header)
        if header.kind == Kind.NEED_BUNDLE:
            self._send_bundle(link, header.bundle)
            return
        if header.kind == Kind.NOTE:
            self._out.append(Note(f"{link.endpoint.name}: {payload.decode(errors='replace')}"))
            return
        ask = link.asks.get((header.stream, header.ticket))
        if ask is None:  # cancelled, or asked elsewhere since
            if header.kind == Kind.ANNOUNCE:
                self._cancel(link, header.stream, header.ticket)
            return
        if header.kind == Kind.PROGRESS:
            ask.position = header.room
        elif header.kind == Kind.ANNOUNCE:
            self._announced(now, ask, header.room)
        elif header.kind == Kind.FAILED and header.flags & Flag.ELSEWHERE:
            self._not_loaded(now, ask, payload)
        elif header.kind == Kind.FAILED:
            self._answered(now, ask)
            self.fail(ask.ticket, payload)
        elif header.kind == Kind.LOST:
            self._lost(now, ask, header.room - 1, payload.decode(errors="replace"))
        self.dispatch(now)

    def begin_body(self, now: float, instance: str, header: Header) -> Extent | None:
        """A body's header came. Returns where it goes, None to read it and throw it away.

        Raises RemoteProtocolError when the body is larger than what was granted for it.
        """
        link = self.links.get(instance)
        if link is None or header.generation != self.generation:
            return None
        self._heard(now, link, header)
        ask = link.asks.get((header.stream, header.ticket))
        if ask is None or ask.extent is None:
            self.counters.late_copies += 1
            return None
        if header.nbytes > ask.extent.nbytes:
            if ask.state is not AttemptState.ASKED:
                raise RemoteProtocolError(
                    f"a body of {header.nbytes} bytes came where {ask.extent.nbytes} were granted"
                )
            # An earlier copy, cancelled too late, of what was asked again here with less room.
            self.counters.late_copies += 1
            if self.placer.fits(header.nbytes):
                self._saw_size(ask.ticket.stream, header.nbytes)
            self.drop_ask(ask, cancel=True)
            self.dispatch(now)
            return None
        if ask.state is AttemptState.ASKED:
            ask.granted_at = now
        ask.state, ask.nbytes, ask.position = AttemptState.RECEIVING, header.nbytes, None  # it is made
        return ask.extent

    def end_body(self, now: float, instance: str, header: Header) -> None:
        """The body is whole in its extent. The first copy of a ticket wins."""
        link = self.links.get(instance)
        ask = None if link is None else link.asks.get((header.stream, header.ticket))
        if link is None or ask is None or ask.extent is None:
            return
        link.bundle_loads = header.room
        extent = self.placer.space.trim(ask.extent, header.nbytes)
        ask.extent = None
        self._answered(now, ask)
        ticket, stream = ask.ticket, ask.ticket.stream
        self.drop_ask(ask, cancel=False, requeue=False)
        for other in ticket.asks[:]:
            self.drop_ask(other, cancel=True, requeue=False)
        ticket.move(Event.FILL)
        ticket.lease = self.placer.lease(ticket, extent)
        self.counters.batches += 1
        self.counters.nbytes += header.nbytes
        self._out.append(Publish(ticket.lease, stream.id, ticket.number, extent, header.nbytes))
        self._saw_size(stream, header.nbytes)
        if self.starved:
            self.grant(now)
        self.dispatch(now)

    # Decisions

    def dispatch(self, now: float) -> None:
        """Asks feeders for queued tickets, nearest to their turn first, while a feeder has room."""
        links = self.links.values()
        while True:
            queued = [ticket for stream in self.streams.values() if (ticket := stream.peek()) is not None]
            if len(queued) > 1:
                queued.sort(key=lambda t: t.number - t.stream.awaited)
            for ticket in queued:
                if refusal := self._versions.refusal(ticket.stream, links):
                    self.fail_service(ticket, "ServiceUnavailable", refusal)
                    break
                link = choose.choose(links, ticket.stream)
                if link is not None:
                    self.ask(now, ticket, link)
                    break
            else:
                if not queued or not self._trust_suspects():
                    return

    def _trust_suspects(self) -> bool:
        """With nobody else left, silent feeders are asked again. Says whether that changed anything."""
        up = [link for link in self.links.values() if link.up and not link.draining]
        if not up or any(link.suspect_since is None for link in up):
            return False
        for link in up:
            link.suspect_since = None
        return True

    def ask(self, now: float, ticket: Ticket, link: Link) -> None:
        """Asks one feeder for a copy of `ticket`, with room for it where the pool has some."""
        stream = ticket.stream
        ask = Attempt(ticket, link, now)
        if stream.size_hint:
            ask.extent = self.placer.space.alloc(stream.size_hint)
        ticket.move(Event.ASK)
        ticket.asks.append(ask)
        if ticket.first_asked_at is None:
            ticket.first_asked_at = now
        link.asks[stream.id, ticket.number] = ask
        self.counters.asks += 1
        flags = (Flag.CHECKSUM if self.settings.checksum else 0) | (Flag.PROBE if ticket.probe else 0)
        header = frames.pack(
            Kind.TICKET, generation=self.generation, stream=stream.id, ticket=ticket.number, bundle=stream.bundle,
            nbytes=len(ticket.payload), room=ask.extent.nbytes if ask.extent else 0, flags=flags,
        )  # fmt: skip
        self._out.append(Send(link.endpoint.instance, header, ticket.payload))
        if stream.bundle not in link.bundles:  # it would ask for it: a round trip
            link.bundles.add(stream.bundle)
            self._send_bundle(link, stream.bundle)

    def drop_ask(self, ask: Attempt, *, cancel: bool, requeue: bool = True) -> None:
        """Forgets one feeder's copy; with no other copy in the making the ticket is queued again."""
        ticket, link = ask.ticket, ask.link
        ticket.asks.remove(ask)
        link.asks.pop((ticket.stream.id, ticket.number), None)
        if ask.extent is not None:
            if ask.state is AttemptState.RECEIVING and link.up:
                self._out.append(Discard(link.endpoint.instance))
            self.placer.free(ask.extent)
            ask.extent = None
        if cancel and link.up:
            self._cancel(link, ticket.stream.id, ticket.number)
        if requeue and not ticket.asks and ticket.state is State.ASKED:
            ticket.move(Event.LOSE)
            ticket.stream.enqueue(ticket)
        self._retire(link)

    def _cancel(self, link: Link, stream: int, ticket: int) -> None:
        header = frames.pack(Kind.CANCEL, generation=self.generation, stream=stream, ticket=ticket)
        self._out.append(Send(link.endpoint.instance, header, b""))

    def grant(self, now: float) -> None:
        """Gives places to announced bodies (`granting`)."""
        self.starved = granting.grant(self, now)

    def fail(self, ticket: Ticket, payload: bytes) -> None:
        """The ticket failed for good; the trainer raises when its turn comes."""
        for ask in ticket.asks[:]:
            self.drop_ask(ask, cancel=True, requeue=False)
        ticket.move(Event.FAIL)
        self.counters.failures += 1
        self._out.append(Fail(ticket.stream.id, ticket.number, payload))

    def fail_service(self, ticket: Ticket, error: str, message: str) -> None:
        """As `fail`, with one of our own errors by its class name."""
        self.fail(ticket, failing.pack(error, message))

    def report(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    # Details

    def _strike(self, ask: Attempt, reason: str) -> None:
        """What made this ticket is gone; it counts against the ticket if it was making one of its samples."""
        ticket = ask.ticket
        if ask.position is not None:
            ticket.strikes += 1
            ticket.position = ask.position
        ticket.probe = True
        self.drop_ask(ask, cancel=False)
        self.counters.reasks += 1
        if ticket.strikes >= MAX_STRIKES and ticket.state is State.QUEUED:
            self._fail_deadly(ticket, reason)

    def _lost(self, now: float, ask: Attempt, position: int, how: str) -> None:
        """The feeder's process that made this ticket ended; the feeder goes on."""
        self._answered(now, ask)
        if position >= 0:
            ask.position = position
        self._strike(ask, f"{ask.link.endpoint.name}: it {how}")

    def _not_loaded(self, now: float, ask: Attempt, payload: bytes) -> None:
        """User code could not be loaded there: other feeders are asked, a few, before the ticket fails."""
        link, ticket = ask.link, ask.ticket
        link.answered_at = now
        link.not_loaded.add(ticket.stream.bundle)
        up = [other for other in self.links.values() if other.up and not other.draining]
        refused = [other for other in up if ticket.stream.bundle in other.not_loaded]
        if len(refused) >= min(MAX_LOADS, len(up)):
            for other in refused:  # a later ticket, or epoch, tries again
                other.not_loaded.discard(ticket.stream.bundle)
            self.fail(ticket, payload)
        else:
            self.drop_ask(ask, cancel=False)

    def _release(self, bundle: bytes) -> None:
        """Tells feeders that no stream uses the bundle any more."""
        if any(stream.bundle == bundle for stream in self.streams.values()):
            return
        self._out.append(Released(bundle))
        header = frames.pack(Kind.RELEASE, generation=self.generation, bundle=bundle)
        for link in self.links.values():
            if bundle in link.bundles:
                link.bundles.discard(bundle)
                self._out.append(Send(link.endpoint.instance, header, b""))

    def _fail_deadly(self, ticket: Ticket, reason: str) -> None:
        self.fail_service(
            ticket,
            "FeederLost",
            f"{ticket.strikes} feeder processes died, each while making "
            f"{tickets.describe(ticket.payload, ticket.position)} of batch {ticket.number} (the last one: {reason}): "
            "look for os._exit, a crash in native code or too little memory there; see what the feeders "
            "printed last",
        )

    def _heard(self, now: float, link: Link, header: Header) -> None:
        link.heard_at, link.load = now, header.load
        link.replace_asked = False
        # While user code there takes long, the feeder says so: it is not lost, and gets nothing more to do.
        if header.kind != Kind.ALIVE and not (header.kind == Kind.CANCELLED and link.asks):
            link.suspect_since = None

    def _answered(self, now: float, ask: Attempt) -> None:
        """The feeder finished making this batch: what it took is the time since it could begin."""
        ask.ticket.stream.pace.add(now - max(ask.asked_at, ask.link.answered_at))
        ask.link.answered_at = now

    def _announced(self, now: float, ask: Attempt, nbytes: int) -> None:
        if ask.state is not AttemptState.ASKED:
            return
        self._answered(now, ask)
        if not self.placer.fits(nbytes):
            self.fail_service(
                ask.ticket,
                "InputError",
                f"a batch of {mb(nbytes)} needs a place in shared memory, the limit is "
                f"{mb(self.settings.limit_nbytes)}: raise spec.sidecar.sharedMemory or lower the batch size",
            )
            return
        if ask.extent is not None:
            self.placer.free(ask.extent)
            ask.extent = None
        ask.state, ask.nbytes, ask.position = AttemptState.ANNOUNCED, nbytes, None
        self._saw_size(ask.ticket.stream, nbytes)
        self.grant(now)

    def _saw_size(self, stream: Stream, nbytes: int) -> None:
        before = stream.size_hint
        stream.saw_size(nbytes)
        if stream.size_hint > before:
            self.placer.fit(self.streams.values(), nbytes)

    def _send_bundle(self, link: Link, bundle: bytes) -> None:
        for stream in self.streams.values():
            if stream.bundle == bundle:
                header = frames.pack(
                    Kind.BUNDLE, generation=self.generation, bundle=bundle, nbytes=len(stream.manifest)
                )
                self._out.append(Send(link.endpoint.instance, header, stream.manifest))
                return

    def _compare(self, stream: Stream, link: Link) -> None:
        if note := self._versions.compare(stream, link):
            self._out.append(Note(note))
