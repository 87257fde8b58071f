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
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.sidecar.dispatch import choose, granting
from dataloaderjob.sidecar.dispatch.instructions import (
    Close,
    Connect,
    Counters,
    Discard,
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
from dataloaderjob.sidecar.dispatch.streams import (
    Attempt,
    AttemptState,
    Event,
    FeederState,
    State,
    Stream,
    Ticket,
)
from dataloaderjob.sidecar.dispatch.versions import Versions


class Dispatcher:
    """The state of one pool: its streams, its feeders, its space."""

    def __init__(self, settings: LoaderSettings, *, generation: int) -> None:
        self.settings = settings
        self.generation = generation
        self.streams: dict[int, Stream] = {}
        self.feeders: dict[str, FeederState] = {}
        self.counters = Counters()
        self.feeders_lost_at: float | None = None
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
        for feeder in self.feeders.values():
            if feeder.up:
                self._compare(made, feeder)

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
            for attempt in ticket.attempts[:]:
                self.drop_attempt(attempt, cancel=True)
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
        if (feeder := self.feeders.get(instance)) is not None:
            feeder.moved_at = now

    # Events from the supervisor and the connections

    def set_feeders(self, now: float, endpoints: list[Endpoint]) -> None:
        """The list of feeders as it should be. A feeder that is no longer listed finishes what it has."""
        listed = {e.instance: e for e in endpoints}
        for instance, endpoint in listed.items():
            if instance not in self.feeders:
                self.feeders[instance] = FeederState(endpoint, now)
                self._out.append(Connect(endpoint))
            else:
                self.feeders[instance].draining = False
        for instance, feeder in list(self.feeders.items()):
            if instance not in listed:
                feeder.draining = True
                self._retire(feeder)
        self.dispatch(now)

    def _retire(self, feeder: FeederState) -> None:
        if (
            feeder.draining
            and not feeder.attempts
            and self.feeders.pop(feeder.endpoint.instance, None) is not None
        ):
            self._out.append(Close(feeder.endpoint.instance, "no longer listed", False))

    def feeder_up(self, now: float, instance: str, facts: dict[str, Any]) -> None:
        feeder = self.feeders.get(instance)
        if feeder is None:
            return
        feeder.up, feeder.facts, feeder.heard_at, feeder.answered_at = True, facts, now, now
        feeder.suspect_since, feeder.load = None, 0
        feeder.refused.clear()
        feeder.not_loaded.clear()
        for stream in self.streams.values():
            self._compare(stream, feeder)
        self.dispatch(now)

    def feeder_down(self, now: float, instance: str, reason: str) -> None:
        """The connection ended, for whatever reason. All that was asked there is asked again elsewhere."""
        feeder = self.feeders.get(instance)
        if feeder is None or not feeder.up:
            return
        feeder.up, feeder.down_since, feeder.replace_asked = False, now, False
        self.counters.feeders_lost += 1
        feeder.bundles.clear()
        for attempt in list(feeder.attempts.values()):
            self._strike(attempt, reason)
        self._retire(feeder)
        if not any(other.up for other in self.feeders.values()):
            self.feeders_lost_at = now
        self.grant(now)
        self.dispatch(now)

    def frame(self, now: float, instance: str, header: Header, payload: bytes) -> None:
        """Any frame of a feeder but BODY. Raises RemoteProtocolError: the shell closes the connection."""
        feeder = self.feeders.get(instance)
        if feeder is None or header.generation != self.generation:
            return
        self._heard(now, feeder, header)
        if header.kind == Kind.NEED_BUNDLE:
            self._send_bundle(feeder, header.bundle)
            return
        if header.kind == Kind.NOTE:
            self._out.append(Note(f"{feeder.endpoint.name}: {payload.decode(errors='replace')}"))
            return
        attempt = feeder.attempts.get((header.stream, header.ticket))
        if attempt is None:  # cancelled, or asked elsewhere since
            if header.kind == Kind.ANNOUNCE:
                self._cancel(feeder, header.stream, header.ticket)
            return
        if header.kind == Kind.PROGRESS:
            attempt.position = header.room
        elif header.kind == Kind.ANNOUNCE:
            self._announced(now, attempt, header.room)
        elif header.kind == Kind.FAILED and header.flags & Flag.ELSEWHERE:
            self._not_loaded(now, attempt, payload)
        elif header.kind == Kind.FAILED:
            self._answered(now, attempt)
            self.fail(attempt.ticket, payload)
        elif header.kind == Kind.LOST:
            self._lost(now, attempt, header.room - 1, payload.decode(errors="replace"))
        self.dispatch(now)

    def begin_body(self, now: float, instance: str, header: Header) -> Extent | None:
        """A body's header came. Returns where it goes, None to read it and throw it away.

        Raises RemoteProtocolError when the body is larger than what was granted for it.
        """
        feeder = self.feeders.get(instance)
        if feeder is None or header.generation != self.generation:
            return None
        self._heard(now, feeder, header)
        attempt = feeder.attempts.get((header.stream, header.ticket))
        if attempt is None or attempt.extent is None:
            self.counters.late_copies += 1
            return None
        if header.nbytes > attempt.extent.nbytes:
            if attempt.state is not AttemptState.ASKED:
                raise RemoteProtocolError(
                    f"a body of {header.nbytes} bytes came where {attempt.extent.nbytes} were granted"
                )
            # An earlier copy, cancelled too late, of what was asked again here with less room.
            self.counters.late_copies += 1
            if self.placer.fits(header.nbytes):
                self._saw_size(attempt.ticket.stream, header.nbytes)
            self.drop_attempt(attempt, cancel=True)
            self.dispatch(now)
            return None
        if attempt.state is AttemptState.ASKED:
            attempt.granted_at = now
        attempt.state, attempt.nbytes, attempt.position = (
            AttemptState.RECEIVING,
            header.nbytes,
            None,
        )  # it is made
        return attempt.extent

    def end_body(self, now: float, instance: str, header: Header) -> None:
        """The body is whole in its extent. The first copy of a ticket wins."""
        feeder = self.feeders.get(instance)
        attempt = None if feeder is None else feeder.attempts.get((header.stream, header.ticket))
        if feeder is None or attempt is None or attempt.extent is None:
            return
        feeder.bundle_loads = header.room
        extent = self.placer.space.trim(attempt.extent, header.nbytes)
        attempt.extent = None
        self._answered(now, attempt)
        ticket, stream = attempt.ticket, attempt.ticket.stream
        self.drop_attempt(attempt, cancel=False, requeue=False)
        for other in ticket.attempts[:]:
            self.drop_attempt(other, cancel=True, requeue=False)
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
        feeders = self.feeders.values()
        while True:
            queued = [ticket for stream in self.streams.values() if (ticket := stream.peek()) is not None]
            if len(queued) > 1:
                queued.sort(key=lambda t: t.number - t.stream.awaited)
            for ticket in queued:
                if refusal := self._versions.refusal(ticket.stream, feeders):
                    self.fail_service(ticket, "ServiceUnavailable", refusal)
                    break
                feeder = choose.choose(feeders, ticket.stream)
                if feeder is not None:
                    self.ask(now, ticket, feeder)
                    break
            else:
                if not queued or not self._trust_suspects():
                    return

    def _trust_suspects(self) -> bool:
        """With nobody else left, silent feeders are asked again. Says whether that changed anything."""
        up = [feeder for feeder in self.feeders.values() if feeder.up and not feeder.draining]
        if not up or any(feeder.suspect_since is None for feeder in up):
            return False
        for feeder in up:
            feeder.suspect_since = None
        return True

    def ask(self, now: float, ticket: Ticket, feeder: FeederState) -> None:
        """Asks one feeder for a copy of `ticket`, with room for it where the pool has some."""
        stream = ticket.stream
        attempt = Attempt(ticket, feeder, now)
        if stream.size_hint:
            attempt.extent = self.placer.space.alloc(stream.size_hint)
        ticket.move(Event.ASK)
        ticket.attempts.append(attempt)
        if ticket.first_asked_at is None:
            ticket.first_asked_at = now
        feeder.attempts[stream.id, ticket.number] = attempt
        self.counters.attempts += 1
        flags = (Flag.CHECKSUM if self.settings.checksum else 0) | (Flag.PROBE if ticket.probe else 0)
        header = frames.pack(
            Kind.TICKET, generation=self.generation, stream=stream.id, ticket=ticket.number, bundle=stream.bundle,
            nbytes=len(ticket.payload), room=attempt.extent.nbytes if attempt.extent else 0, flags=flags,
        )  # fmt: skip
        self._out.append(Send(feeder.endpoint.instance, header, ticket.payload))
        if stream.bundle not in feeder.bundles:  # it would ask for it: a round trip
            feeder.bundles.add(stream.bundle)
            self._send_bundle(feeder, stream.bundle)

    def drop_attempt(self, attempt: Attempt, *, cancel: bool, requeue: bool = True) -> None:
        """Forgets one feeder's copy; with no other copy in the making the ticket is queued again."""
        ticket, feeder = attempt.ticket, attempt.feeder
        ticket.attempts.remove(attempt)
        feeder.attempts.pop((ticket.stream.id, ticket.number), None)
        if attempt.extent is not None:
            if attempt.state is AttemptState.RECEIVING and feeder.up:
                self._out.append(Discard(feeder.endpoint.instance))
            self.placer.free(attempt.extent)
            attempt.extent = None
        if cancel and feeder.up:
            self._cancel(feeder, ticket.stream.id, ticket.number)
        if requeue and not ticket.attempts and ticket.state is State.ASKED:
            ticket.move(Event.LOSE)
            ticket.stream.enqueue(ticket)
        self._retire(feeder)

    def _cancel(self, feeder: FeederState, stream: int, ticket: int) -> None:
        header = frames.pack(Kind.CANCEL, generation=self.generation, stream=stream, ticket=ticket)
        self._out.append(Send(feeder.endpoint.instance, header, b""))

    def grant(self, now: float) -> None:
        """Gives places to announced bodies (`granting`)."""
        self.starved = granting.grant(self, now)

    def fail(self, ticket: Ticket, payload: bytes) -> None:
        """The ticket failed for good; the trainer raises when its turn comes."""
        for attempt in ticket.attempts[:]:
            self.drop_attempt(attempt, cancel=True, requeue=False)
        ticket.move(Event.FAIL)
        self.counters.failures += 1
        self._out.append(Fail(ticket.stream.id, ticket.number, payload))

    def fail_service(self, ticket: Ticket, error: str, message: str) -> None:
        """As `fail`, with one of our own errors by its class name."""
        self.fail(ticket, failing.pack(error, message))

    def report(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    # Details

    def _strike(self, attempt: Attempt, reason: str) -> None:
        """What made this ticket is gone; it counts against the ticket if it was making one of its samples."""
        ticket = attempt.ticket
        if attempt.position is not None:
            ticket.strikes += 1
            ticket.position = attempt.position
        ticket.probe = True
        self.drop_attempt(attempt, cancel=False)
        self.counters.retries += 1
        if ticket.strikes >= MAX_STRIKES and ticket.state is State.QUEUED:
            self._fail_deadly(ticket, reason)

    def _lost(self, now: float, attempt: Attempt, position: int, how: str) -> None:
        """The feeder's process that made this ticket ended; the feeder goes on."""
        self._answered(now, attempt)
        if position >= 0:
            attempt.position = position
        self._strike(attempt, f"{attempt.feeder.endpoint.name}: it {how}")

    def _not_loaded(self, now: float, attempt: Attempt, payload: bytes) -> None:
        """User code could not be loaded there: other feeders are asked, a few, before the ticket fails."""
        feeder, ticket = attempt.feeder, attempt.ticket
        feeder.answered_at = now
        feeder.not_loaded.add(ticket.stream.bundle)
        up = [other for other in self.feeders.values() if other.up and not other.draining]
        refused = [other for other in up if ticket.stream.bundle in other.not_loaded]
        if len(refused) >= min(MAX_LOADS, len(up)):
            for other in refused:  # a later ticket, or epoch, tries again
                other.not_loaded.discard(ticket.stream.bundle)
            self.fail(ticket, payload)
        else:
            self.drop_attempt(attempt, cancel=False)

    def _release(self, bundle: bytes) -> None:
        """Tells feeders that no stream uses the bundle any more."""
        if any(stream.bundle == bundle for stream in self.streams.values()):
            return
        self._out.append(Released(bundle))
        header = frames.pack(Kind.RELEASE, generation=self.generation, bundle=bundle)
        for feeder in self.feeders.values():
            if bundle in feeder.bundles:
                feeder.bundles.discard(bundle)
                self._out.append(Send(feeder.endpoint.instance, header, b""))

    def _fail_deadly(self, ticket: Ticket, reason: str) -> None:
        self.fail_service(
            ticket,
            "FeederLost",
            f"{ticket.strikes} feeder processes died, each while making "
            f"{tickets.describe(ticket.payload, ticket.position)} of batch {ticket.number} (the last one: {reason}): "
            "look for os._exit, a crash in native code or too little memory there; see what the feeders "
            "printed last",
        )

    def _heard(self, now: float, feeder: FeederState, header: Header) -> None:
        feeder.heard_at, feeder.load = now, header.load
        feeder.replace_asked = False
        # While user code there takes long, the feeder says so: it is not lost, and gets nothing more to do.
        if header.kind != Kind.ALIVE and not (header.kind == Kind.CANCELLED and feeder.attempts):
            feeder.suspect_since = None

    def _answered(self, now: float, attempt: Attempt) -> None:
        """The feeder finished making this batch: what it took is the time since it could begin."""
        attempt.ticket.stream.pace.add(now - max(attempt.asked_at, attempt.feeder.answered_at))
        attempt.feeder.answered_at = now

    def _announced(self, now: float, attempt: Attempt, nbytes: int) -> None:
        if attempt.state is not AttemptState.ASKED:
            return
        self._answered(now, attempt)
        if not self.placer.fits(nbytes):
            self.fail_service(
                attempt.ticket,
                "InputError",
                f"a batch of {mb(nbytes)} needs a place in shared memory, the limit is "
                f"{mb(self.settings.limit_nbytes)}: raise spec.sidecar.sharedMemory or lower the batch size",
            )
            return
        if attempt.extent is not None:
            self.placer.free(attempt.extent)
            attempt.extent = None
        attempt.state, attempt.nbytes, attempt.position = AttemptState.ANNOUNCED, nbytes, None
        self._saw_size(attempt.ticket.stream, nbytes)
        self.grant(now)

    def _saw_size(self, stream: Stream, nbytes: int) -> None:
        before = stream.size_hint
        stream.saw_size(nbytes)
        if stream.size_hint > before:
            self.placer.fit(self.streams.values(), nbytes)

    def _send_bundle(self, feeder: FeederState, bundle: bytes) -> None:
        for stream in self.streams.values():
            if stream.bundle == bundle:
                header = frames.pack(
                    Kind.BUNDLE, generation=self.generation, bundle=bundle, nbytes=len(stream.manifest)
                )
                self._out.append(Send(feeder.endpoint.instance, header, stream.manifest))
                return

    def _compare(self, stream: Stream, feeder: FeederState) -> None:
        if note := self._versions.compare(stream, feeder):
            self._out.append(Note(note))
