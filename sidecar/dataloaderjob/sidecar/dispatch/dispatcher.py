"""The receiver's state machine. It takes tickets, sends them to feeders, places bodies and publishes batches. Pure.

Each event is a method call that includes the time, and yields instructions. This module uses no sockets or clocks, and
never sees the bytes of a batch. Its shell is `sidecar.receiver`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dataloaderjob.core import frames, ticket_codec
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import SINCE, Flag, FrameKind, Header
from dataloaderjob.core.processes import Backoff
from dataloaderjob.core.texts import clean
from dataloaderjob.sidecar.dispatch.assignments import MAX_STRIKES, Assignments
from dataloaderjob.sidecar.dispatch.choose import first_place
from dataloaderjob.sidecar.dispatch.deadly_samples import deadly_error
from dataloaderjob.sidecar.dispatch.instructions import Connect, Note, Publish, Snapshot
from dataloaderjob.sidecar.dispatch.placing import mb
from dataloaderjob.sidecar.dispatch.streams import (
    Attempt,
    AttemptState,
    Endpoint,
    Extent,
    FeederState,
    Stream,
    Ticket,
    TicketEvent,
    TicketState,
)

MAX_LOADS = 3
"""Number of feeders that must fail to load a bundle before its tickets fail. A single feeder may lack a mount that
appears later."""
LOAD_AGAIN = Backoff(30.0, 600.0)
"""Back-off before a feeder that could not load a bundle is asked again, because it may have lacked a mount."""
NOTES_APART_S = 4.0
"""Minimum time between identical notes, because feeders that start together would all send the same one."""
MAX_NOTED = 64
MAX_ASKED = 256
"""Maximum number of manifests that a feeder gets in one tick. This is also the number that it keeps."""


class Dispatcher(Assignments):
    """The state machine. Callers report an event, and then `take` the resulting instructions."""

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
        self.streams[stream] = made = Stream(stream, bundle, manifest, facts, window, awaited)
        for feeder in self.feeders.values():
            if feeder.up:
                self.compare(made, feeder)

    def tickets(
        self,
        now: float,
        stream_id: int,
        entries: list[tuple[int, bytes]],
        awaited: int,
        *,
        waiting: bool = False,
    ) -> None:
        """Handles new tickets, given as (number, payload). `waiting`: the trainer sleeps until `awaited` is ready.
        Raises RemoteProtocolError for a ticket of an unknown stream and for a repeated ticket."""
        stream = self.streams.get(stream_id)
        for number, payload in entries:
            if stream is None or number in stream.tickets or number < stream.awaited:
                raise RemoteProtocolError(f"ticket {number} of stream {stream_id} was not expected")
            ticket = Ticket(stream, number, payload, now)
            if ticket_codec.slot_of(payload) is not None:
                self._place_in_slot(now, ticket)
            stream.tickets[number] = ticket
            stream.enqueue(ticket)
        if stream is not None:
            self.advance(stream, awaited)
            stream.waiting_since = now if waiting else None
            if self.starved:
                self.grant(now)
        self.dispatch(now)

    def _place_in_slot(self, now: float, ticket: Ticket) -> None:
        """Assigns a ticket to its slot. Raises RemoteProtocolError if the stream's bundle has no such slot."""
        asked = ticket_codec.unpack_slot_ticket(ticket.payload)
        if asked is not None:
            ticket.slot = ticket.stream.slots.get(now, asked.slot, ticket.stream.manifest)
            ticket.number_in_slot, ticket.asks = asked.number, asked.asks
            ticket.slot.needed = asked.needed
            if (
                asked.snapshot is not None
            ):  # the epoch resumes from a state, or an earlier receiver had the snapshot
                ticket.slot.floor = max(ticket.slot.floor, asked.snapshot[0] if ticket.slot.ranks else 0)
                ticket.slot.remember(*asked.snapshot)
            if asked.known is not None:
                ticket.slot.received(*asked.known)

    def advance(self, stream: Stream, awaited: int) -> None:
        """Records that the trainer has taken all tickets below `awaited`."""
        while stream.awaited < awaited and stream.tickets:  # untrusted input must not cause an endless loop
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
        self.release(stream)
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
        """Records that part of a body has arrived from a feeder."""
        if (feeder := self.feeders.get(instance)) is not None:
            feeder.moved_at = now

    # Events from the supervisor and the connections

    def set_feeders(self, now: float, endpoints: list[Endpoint]) -> None:
        """Handles a new list of wanted feeders. A feeder that is no longer listed finishes the tickets that it has."""
        first = first_place(self.rank, len(endpoints))
        listed = {e.instance: e for e in (*endpoints[first:], *endpoints[:first])}
        for instance, endpoint in listed.items():
            if instance not in self.feeders:
                self.feeders[instance] = FeederState(endpoint, now)
                self._out.append(Connect(endpoint))
        for instance, feeder in self.feeders.items():
            feeder.draining = instance not in listed
            self.ranks.place(feeder)
        for feeder in list(self.feeders.values()):
            self.retire(feeder)
        self.dispatch(now)

    def feeder_up(self, now: float, instance: str, facts: dict[str, Any]) -> None:
        feeder = self.feeders.get(instance)
        if feeder is None:
            return
        feeder.up, feeder.facts, feeder.received_at, feeder.answered_at = True, facts, now, now
        feeder.load, feeder.filling, feeder.why_down = 0, True, ""
        if self.served_at is None:
            self.served_at = now
        for ticket in feeder.struck:  # the network failed, not the process
            ticket.unconfirmed -= 1
        feeder.struck.clear()
        feeder.refused.clear()
        feeder.not_loaded.clear()
        feeder.load_failures.clear()
        self.trust(feeder)
        for stream in self.streams.values():
            self.compare(stream, feeder)
        self.dispatch(now)

    def feeder_down(self, now: float, instance: str, reason: str) -> None:
        """Handles a connection that ended or could not be opened. The feeder's tickets are queued again."""
        feeder = self.feeders.get(instance)
        if feeder is None:
            return
        feeder.why_down = reason
        if not feeder.up:
            return
        feeder.up, feeder.down_since, feeder.replace_asked_at = False, now, None
        self.trust(feeder)
        self.counters.feeders_lost += 1
        feeder.bundles.clear()
        feeder.asked_bundles.clear()
        for attempt in list(feeder.attempts.values()):
            self._lose(attempt)
            if attempt.position is not None:
                attempt.ticket.unconfirmed += 1
                feeder.struck.append(attempt.ticket)
        self.retire(feeder)
        if not any(other.up for other in self.feeders.values()):
            self.feeders_lost_at = now
        self.grant(now)
        self.dispatch(now)

    def frame(self, now: float, instance: str, header: Header, payload: bytes) -> None:
        """Handles a frame other than BODY from a feeder. If this raises RemoteProtocolError, the shell closes the
        connection."""
        feeder = self.feeders.get(instance)
        if feeder is None:
            return
        self._received(now, feeder, header)
        if header.kind == FrameKind.NEED_BUNDLE:
            if len(feeder.asked_bundles) < MAX_ASKED:  # answered once per tick, however often the feeder asks
                feeder.asked_bundles.add(header.bundle)
            return
        if header.kind == FrameKind.SNAPSHOT:
            self._snapshot(feeder, header.stream, payload)
            return
        if header.kind == FrameKind.NOTE:
            self._note(now, feeder, payload.decode(errors="replace"))
            return
        attempt = feeder.attempts.get((header.stream, header.ticket))
        if attempt is None:  # cancelled, or requested elsewhere since
            if header.kind == FrameKind.ANNOUNCE:
                self.cancel(feeder, header.stream, header.ticket)
            return
        if header.kind == FrameKind.PROGRESS:
            attempt.position = header.room
        elif (
            header.kind == FrameKind.ALIVE and attempt.replayed < header.room <= attempt.ticket.number_in_slot
        ):
            # Only earlier batches of the slot can be rebuilt. Accepting other claims would postpone the deadline
            # forever.
            attempt.replayed, attempt.progressed_at = header.room, now
        elif header.kind == FrameKind.ANNOUNCE:
            self._announced(now, attempt, header.room)
        elif header.kind == FrameKind.FAILED and header.flags & Flag.ELSEWHERE:
            self._not_loaded(now, attempt, payload)
        elif header.kind == FrameKind.FAILED and header.flags & Flag.ENDED:
            self._ended(now, attempt, payload)
        elif header.kind == FrameKind.FAILED:
            self._finished(now, attempt)
            self.fail(attempt.ticket, payload)
        elif header.kind == FrameKind.LOST:
            how = payload.decode(errors="replace")
            self._lost(now, attempt, header.room - 1, how, of_memory=bool(header.flags & Flag.MEMORY))
        self.dispatch(now)

    def _note(self, now: float, feeder: FeederState, text: str) -> None:
        """Forwards a feeder's note. If several feeders report the same ongoing work, forwards only one of their
        notes."""
        text = clean(text)
        what, since, _ = text.rpartition(SINCE)
        if since:
            if now - self._noted.get(what, float("-inf")) < NOTES_APART_S:
                return
            if len(self._noted) >= MAX_NOTED:
                self._noted.clear()
            self._noted[what] = now
        self._out.append(Note(f"{feeder.endpoint.name}: {text}"))

    def _ended(self, now: float, attempt: Attempt, payload: bytes) -> None:
        """Handles a ticket that yields no batch although nothing failed: its slot has no such batch, or the ticket only
        asks whether the batch exists. Raises RemoteProtocolError if the answer cannot belong to this ticket."""
        ticket = attempt.ticket
        if ticket.slot is None:
            raise RemoteProtocolError(
                f"ticket {ticket.number} has no slot that could end, but {attempt.feeder.endpoint.name} reports the "
                "end of a slot"
            )
        if not frames.says_there(payload):
            batches = frames.unpack_end(payload, ticket.number_in_slot)
            self._finished(now, attempt)
            self.say_end(ticket, batches)
        elif ticket.asks:
            self._finished(now, attempt)
            self.say_there(ticket)
        else:
            raise RemoteProtocolError(
                f"ticket {ticket.number} requests a batch, but a feeder answered only that the batch exists"
            )

    def _finished(self, now: float, attempt: Attempt) -> None:
        """Records that the feeder has finished with a ticket that yields no batch."""
        attempt.answer(now)
        self._begins(attempt.feeder, attempt.ticket, True)
        self.drop_attempt(attempt, cancel=False, requeue=False)

    def begin_body(self, now: float, instance: str, header: Header) -> Extent | None:
        """Handles the header of a body. Returns the extent for the body, or None if the body must be read and
        discarded. Raises RemoteProtocolError if the body is larger than its grant."""
        feeder = self.feeders.get(instance)
        if feeder is None:
            return None
        self._received(now, feeder, header)
        attempt = feeder.attempts.get((header.stream, header.ticket))
        if attempt is None or attempt.extent is None:
            self.counters.late_copies += 1
            return None
        if header.nbytes > attempt.extent.nbytes:
            if attempt.state is not AttemptState.ASKED:
                raise RemoteProtocolError(
                    f"a body of {header.nbytes} bytes arrived, but only {attempt.extent.nbytes} bytes were granted"
                )
            # This is an earlier copy, which was cancelled too late. The ticket was sent here again, with less room.
            self.counters.late_copies += 1
            if self.placer.fits(header.nbytes):
                self.saw_size(attempt.ticket.stream, header.nbytes)
            self.drop_attempt(attempt, cancel=True)
            self.dispatch(now)
            return None
        if attempt.state is AttemptState.ASKED:
            attempt.granted_at = now
        attempt.state, attempt.nbytes = AttemptState.RECEIVING, header.nbytes
        attempt.position = None  # the batch is made
        return attempt.extent

    def end_body(self, now: float, instance: str, header: Header, digest: int = 0) -> None:
        """Handles a body that has arrived completely. `digest`: the body's digest. The first copy of a ticket's batch
        wins."""
        feeder = self.feeders.get(instance)
        attempt = None if feeder is None else feeder.attempts.get((header.stream, header.ticket))
        if feeder is None or attempt is None or attempt.extent is None:
            return
        feeder.bundle_loads = header.room
        if feeder.load_failures:
            feeder.load_failures.pop(attempt.ticket.bundle, None)
        extent = self.placer.space.trim(attempt.extent, header.nbytes)
        attempt.extent = None
        attempt.answer(now)
        ticket, stream = attempt.ticket, attempt.ticket.stream
        if ticket.slot is not None:
            ticket.slot.received(ticket.number_in_slot, digest)
            self._begins(feeder, ticket, True)
        self.drop_attempt(attempt, cancel=False, requeue=False)
        for other in ticket.attempts[:]:
            self.drop_attempt(other, cancel=True, requeue=False)
        ticket.move(TicketEvent.FILL)
        ticket.lease = self.placer.lease(ticket, extent)
        self.counters.batches += 1
        self.counters.nbytes += header.nbytes
        self._out.append(Publish(ticket.lease, stream.id, ticket.number, extent, header.nbytes))
        self.saw_size(stream, header.nbytes)
        if self.starved:
            self.grant(now)
        self.dispatch(now)

    def _snapshot(self, feeder: FeederState, stream_id: int, payload: bytes) -> None:
        """Keeps a snapshot from a slot's home for the next home. Also passes it to the trainer, for the loader's
        state."""
        number, made, state = frames.unpack_snapshot(payload)
        stream = self.streams.get(stream_id)
        slot = None if stream is None else stream.slots.of.get(number)
        if slot is not None and slot.home == feeder.endpoint.instance and slot.remember(made, state):
            self._out.append(Snapshot(stream_id, number, payload))

    # Details

    def _lose(self, attempt: Attempt) -> None:
        """Handles the loss of the process that was making a ticket's batch. The next process reports each sample before
        making it."""
        ticket = attempt.ticket
        self._begins(attempt.feeder, ticket, False)
        if attempt.position is not None:
            ticket.position = attempt.position
        ticket.probe = True
        self.drop_attempt(attempt, cancel=False)
        self.counters.retries += 1

    def _begins(self, feeder: FeederState, ticket: Ticket, begun: bool) -> None:
        """Records that a slot's home has sent part of the slot (`begun`), or that it has lost its progress."""
        if ticket.slot is not None and ticket.slot.home == feeder.endpoint.instance:
            ticket.slot.begun = begun

    def _strike(self, ticket: Ticket, feeder: str, how: str, of_memory: bool | None) -> None:
        """Records that a process died while it was making one of a ticket's samples."""
        ticket.strikes += 1
        ticket.ends.append((feeder, how, of_memory))
        if ticket.slot is not None and ticket.strikes > 1:
            ticket.slot.snapshots.clear()  # a snapshot may be the cause of the death
        if ticket.strikes >= MAX_STRIKES and ticket.state in (TicketState.QUEUED, TicketState.ASKED):
            self.fail_service(ticket, *deadly_error(ticket, self.out_of_memory, self.supervisor_notes))

    def confirm_strikes(self, feeder: FeederState) -> None:
        """Handles the death of a feeder's process. Each ticket that the feeder was making when its connection broke
        gets a strike."""
        struck, feeder.struck = feeder.struck, []
        for ticket in struck:
            ticket.unconfirmed -= 1
            live = self.streams.get(ticket.stream.id) is ticket.stream
            if live and ticket.stream.tickets.get(ticket.number) is ticket:
                # If memory ran out there, the supervisor learns of it later, if at all.
                self._strike(ticket, feeder.endpoint.name, feeder.why_down, None)

    def _lost(self, now: float, attempt: Attempt, position: int, how: str, *, of_memory: bool) -> None:
        """Handles the death of the builder that was making a ticket's batch. The feeder itself continues."""
        attempt.answer(now)
        if position >= 0:
            attempt.position = position
        self._lose(attempt)
        if attempt.position is not None:
            self._strike(attempt.ticket, attempt.feeder.endpoint.name, how, of_memory)

    def _not_loaded(self, now: float, attempt: Attempt, payload: bytes) -> None:
        """Handles a feeder's failure to load user code. A few other feeders try before the ticket fails."""
        feeder, ticket = attempt.feeder, attempt.ticket
        feeder.answered_at = now
        bundle = ticket.bundle
        failures = feeder.load_failures[bundle] = feeder.load_failures.get(bundle, 0) + 1
        feeder.not_loaded[bundle] = now + LOAD_AGAIN.wait_s(failures)
        up = [other for other in self.feeders.values() if other.up and not other.draining]
        refused = [other for other in up if bundle in other.load_failures]
        if len(refused) >= min(MAX_LOADS, len(up)):
            for other in refused:  # a later ticket, or epoch, tries again
                del other.load_failures[bundle]
                other.not_loaded.pop(bundle, None)
            self.fail(ticket, payload)
        else:
            self.drop_attempt(attempt, cancel=False)

    def _received(self, now: float, feeder: FeederState, header: Header) -> None:
        feeder.received_at, feeder.load = now, header.load
        feeder.replace_asked_at = None
        # While user code takes long, the feeder reports that it is alive. It is then not lost, but gets no more work.
        answers = header.kind != FrameKind.ALIVE and not (
            header.kind == FrameKind.CANCELLED and feeder.attempts
        )
        if feeder.suspect_since is not None and answers:
            self.trust(feeder)

    def _announced(self, now: float, attempt: Attempt, nbytes: int) -> None:
        if attempt.state is not AttemptState.ASKED:
            return
        attempt.answer(now)
        if not self.placer.fits(nbytes):
            self.fail_service(
                attempt.ticket,
                "InputError",
                f"a batch needs {mb(nbytes)} of shared memory, but the limit is "
                f"{mb(self.settings.limit_nbytes)}: raise spec.loader.memoryPerProcess or lower the batch "
                "size",
            )
            return
        if attempt.extent is not None:
            self.placer.free(attempt.extent)
            attempt.extent = None
        attempt.state, attempt.nbytes, attempt.position = AttemptState.ANNOUNCED, nbytes, None
        self.announced[attempt] = None
        self.saw_size(attempt.ticket.stream, nbytes)
        self.grant(now)
