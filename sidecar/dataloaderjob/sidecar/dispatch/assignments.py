"""The assignment of a pool's tickets to feeders, and of its batches to places in memory. Pure.

`dispatcher` and `overseer` use these steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dataloaderjob.core import frames, supervision, ticket_codec
from dataloaderjob.core.frames import Flag, FrameKind
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.sidecar.dispatch.choose import Ranks, VersionChecks, depth
from dataloaderjob.sidecar.dispatch.homes import BALANCE_EVERY_S, Slot, better_home, choose_home, stays
from dataloaderjob.sidecar.dispatch.instructions import (
    Close,
    Discard,
    End,
    Fail,
    Instruction,
    Note,
    Released,
    SayThere,
    Send,
)
from dataloaderjob.sidecar.dispatch.placing import Placer, turn
from dataloaderjob.sidecar.dispatch.streams import (
    Attempt,
    AttemptState,
    Counters,
    FeederState,
    Stream,
    Ticket,
    TicketEvent,
    TicketState,
)

MAX_STRIKES = 3
"""Number of feeders that must die while making a ticket's batch before the ticket is considered the cause."""


def _of_slot(ticket: Ticket, slot: Slot) -> tuple[bytes, int]:
    """Returns (payload, flags) for sending a ticket to its slot's home. If the home has not begun the slot, the payload
    includes the snapshot to resume from."""
    snapshot, known = slot.snapshot(ticket.number_in_slot), slot.known(ticket.number_in_slot)
    live = (
        other
        for other in ticket.stream.tickets.values()
        if other.state in (TicketState.QUEUED, TicketState.ASKED)
    )
    if slot.begun or any(other.slot is slot and other.number < ticket.number for other in live):
        return ticket.payload, Flag.RESTORABLE if snapshot or known else 0
    return ticket_codec.with_beginning(ticket.payload, snapshot, known), 0


class Assignments:
    """The state of one pool: its streams, its feeders and its space."""

    def __init__(self, settings: LoaderSettings, *, rank: int = 0) -> None:
        """`rank`: the trainer process's rank; each rank begins with different feeders."""
        self.settings = settings
        self.rank = rank
        self.streams: dict[int, Stream] = {}
        self.feeders: dict[str, FeederState] = {}
        self.ranks = Ranks()
        self.announced: dict[Attempt, None] = {}
        """Attempts whose bodies were announced, and wait for space in the pool."""
        self.suspects: set[str] = set()
        """Instances of feeders that are late and get no further tickets."""
        self.counters = Counters()
        self.feeders_lost_at: float | None = None
        self.served_at: float | None = None
        """Time at which the first feeder connected."""
        self.ended = ""
        """The reason why the job has ended; empty while the job is running."""
        self.unconnected_noted_at = float("-inf")
        self.desired_feeders: int | None = None
        self.supervisor_notes: list[str] = []
        self._noted: dict[str, float] = {}
        """text of a note about ongoing work -> time at which the note was last forwarded."""
        self.out_of_memory: frozenset[str] = frozenset()
        """Names of feeders that ran out of memory recently, according to the supervisor."""
        self.starved = False
        """True if an announced body waits for space. The shell should then report ended leases at once."""
        self._versions = VersionChecks()
        self._out: list[Instruction] = []
        self.placer = Placer(settings.limit_nbytes, settings.pool_nbytes, self._out)

    def take(self) -> list[Instruction]:
        """Returns the instructions to carry out, in order. Call after every event."""
        out = self._out[:]
        self._out.clear()
        return out

    @property
    def busy(self) -> bool:
        """True if `take` would return anything."""
        return bool(self._out)

    def report(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    def _send(self, feeder: FeederState, kind: FrameKind, payload: bytes = b"", **fields: Any) -> None:
        header = frames.pack_header(kind, nbytes=len(payload), **fields)
        self._out.append(Send(feeder.endpoint.instance, header, payload))

    def dispatch(self, now: float) -> None:
        """Sends queued tickets to feeders, those nearest to their turn first, while any feeder has room."""
        while True:
            queued = [ticket for stream in self.streams.values() for ticket in stream.heads()]
            if len(queued) > 1:
                queued.sort(key=lambda t: t.number - t.stream.awaited)
            for ticket in queued:
                if refusal := self._versions.refusal(ticket.stream, self.feeders.values(), now):
                    self.fail_service(ticket, "ServiceUnavailable", refusal)
                    break
                if ticket.unconfirmed and ticket.strikes + ticket.unconfirmed >= MAX_STRIKES:
                    continue  # it may be the cause of the deaths
                slot = ticket.slot
                feeder = self.ranks.choose(ticket.stream) if slot is None else self._home(now, ticket, slot)
                if feeder is not None:
                    self.ask(now, ticket, feeder)
                    break
            else:
                if not queued or not self._trust_suspects():
                    return

    def _home(self, now: float, ticket: Ticket, slot: Slot) -> FeederState | None:
        """Returns the feeder for a slot's ticket, or None if the ticket must wait. Moves the slot to another feeder if
        necessary."""

        def able_to(feeder: FeederState) -> bool:
            return ticket.stream.bundle not in feeder.refused and slot.bundle not in feeder.not_loaded

        home = None if slot.home is None else self.feeders.get(slot.home)
        if stays(home, now, fits=home is not None and able_to(home)):
            if home is None or not home.up:
                return None
            if not self._is_about_to_move(now, ticket, slot, able_to):
                return home
            if any(t.slot is slot and t.attempts for t in ticket.stream.tickets.values()):
                return None
        able = self._able(able_to)
        chosen = slot.next_home if slot.next_home in able else None
        slot.next_home = None
        listed = sum(not feeder.draining for feeder in self.feeders.values())
        chosen = chosen or choose_home(ticket.stream.slots, able, listed, self._homes, now)
        if chosen is None:
            return None
        self._move(ticket, slot, home, able[chosen])
        return able[chosen]

    def _homes(self) -> list[str]:
        """Returns the home of each slot, or the next home of a slot that is about to move."""
        slots = (slot for stream in self.streams.values() for slot in stream.slots.of.values())
        return [slot.next_home or slot.home for slot in slots if slot.home]

    def _able(self, able_to: Callable[[FeederState], bool]) -> dict[str, FeederState]:
        """Returns the feeders that can take a slot now, by instance."""
        return {
            i: f for i, f in self.feeders.items()
            if f.up and not f.draining and f.suspect_since is None and able_to(f)
        }  # fmt: skip

    def _is_about_to_move(
        self, now: float, ticket: Ticket, slot: Slot, able_to: Callable[[FeederState], bool]
    ) -> bool:
        """Returns True if a feeder that makes fewer slots will take over this one."""
        slots = ticket.stream.slots
        if slot.next_home is None and now - slots.balanced_at >= BALANCE_EVERY_S:
            slot.next_home = better_home(slot, ticket.number_in_slot, self._able(able_to), self._homes)
            if slot.next_home is None:
                slots.balanced_at = now
        following = None if slot.next_home is None else self.feeders.get(slot.next_home)
        if following is None or following.draining:
            slot.next_home = None
        return slot.next_home is not None

    def _move(self, ticket: Ticket, slot: Slot, home: FeederState | None, chosen: FeederState) -> None:
        """Gives a slot a new home, starting with the batch of this ticket."""
        slot.begun = False
        beginning = slot.snapshot(ticket.number_in_slot)
        again = ticket.number_in_slot - (beginning[0] if beginning else 0)
        if again:
            self._out.append(
                Note(
                    f"slot {slot.number} continues at {chosen.endpoint.name}, which first rebuilds {again} "
                    "of its batches without sending them"
                )
            )
        owes = home is not None and any(attempt.ticket.slot is slot for attempt in home.attempts.values())
        if home is not None and home.up and not owes and slot.bundle in home.bundles:
            home.bundles.discard(slot.bundle)
            self._send(home, FrameKind.RELEASE, bundle=slot.bundle)
        slot.home = chosen.endpoint.instance

    def _trust_suspects(self) -> bool:
        """Trusts the suspect feeders again if no others are left. Returns True if this changed anything."""
        if not self.suspects:
            return False
        up = [feeder for feeder in self.feeders.values() if feeder.up and not feeder.draining]
        if not up or any(feeder.suspect_since is None for feeder in up):
            return False
        for feeder in up:
            self.trust(feeder)
        return True

    def suspect(self, feeder: FeederState, now: float, *, is_silent: bool = False) -> None:
        """Marks a feeder as late. Until the feeder answers, it gets only tickets of its own slots, or none if it is
        silent."""
        feeder.suspect_since, feeder.is_silent = now, is_silent
        self.suspects.add(feeder.endpoint.instance)
        self.ranks.place(feeder)

    def trust(self, feeder: FeederState) -> None:
        feeder.suspect_since, feeder.is_silent = None, False
        self.suspects.discard(feeder.endpoint.instance)
        self.ranks.place(feeder)

    def ask(self, now: float, ticket: Ticket, feeder: FeederState) -> None:
        """Sends `ticket` to one feeder, and reserves room for the batch if the pool has any."""
        stream = ticket.stream
        attempt = Attempt(ticket, feeder, now)
        if stream.size_hint and not ticket.asks:
            attempt.extent = self.placer.space.alloc(stream.size_hint)
        ticket.move(TicketEvent.ASK)
        ticket.attempts.append(attempt)
        if ticket.first_asked_at is None:
            ticket.first_asked_at = now
        feeder.attempts[stream.id, ticket.number] = attempt
        if ticket.slot is None:
            feeder.chosen += 1
            feeder.filling = feeder.filling and feeder.chosen < depth(stream)
        self.ranks.place(feeder)
        self.counters.attempts += 1
        flags = (Flag.CHECKSUM if self.settings.checksum else 0) | (Flag.PROBE if ticket.probe else 0)
        payload, bundle = ticket.payload, stream.bundle
        if (slot := ticket.slot) is not None:
            bundle = slot.bundle
            payload, flag = _of_slot(ticket, slot)
            flags |= flag
        self._send(
            feeder, FrameKind.TICKET, payload, stream=stream.id, ticket=ticket.number, bundle=bundle,
            room=attempt.extent.nbytes if attempt.extent else 0, flags=flags,
        )  # fmt: skip
        if bundle not in feeder.bundles:  # otherwise the feeder would request it: a round trip
            feeder.bundles.add(bundle)
            self.send_bundle(feeder, bundle)

    def drop_attempt(self, attempt: Attempt, *, cancel: bool, requeue: bool = True) -> None:
        """Forgets one feeder's attempt. With `cancel`, also cancels the ticket at the feeder. With `requeue`, queues
        the ticket again if no other attempt is left."""
        ticket, feeder = attempt.ticket, attempt.feeder
        ticket.attempts.remove(attempt)
        if feeder.attempts.pop((ticket.stream.id, ticket.number), None) is not None:
            feeder.chosen -= ticket.slot is None
        feeder.filling = feeder.filling or feeder.chosen <= depth(ticket.stream) // 2
        self.ranks.place(feeder)
        self.announced.pop(attempt, None)
        if attempt.extent is not None:
            if attempt.state is AttemptState.RECEIVING and feeder.up:
                self._out.append(Discard(feeder.endpoint.instance))
            self.placer.free(attempt.extent)
            attempt.extent = None
        if cancel and feeder.up:
            self.cancel(feeder, ticket.stream.id, ticket.number)
        if requeue and not ticket.attempts and ticket.state is TicketState.ASKED:
            ticket.move(TicketEvent.LOSE)
            ticket.stream.enqueue(ticket)
        self.retire(feeder)

    def cancel(self, feeder: FeederState, stream: int, ticket: int) -> None:
        self._send(feeder, FrameKind.CANCEL, stream=stream, ticket=ticket)

    def retire(self, feeder: FeederState) -> None:
        instance = feeder.endpoint.instance
        if feeder.struck:  # it is not known yet why its process exited
            return
        if feeder.draining and not feeder.attempts and self.feeders.pop(instance, None) is not None:
            self.suspects.discard(instance)
            self._out.append(Close(instance, "no longer listed", False))

    def grant(self, now: float) -> None:
        """Gives places to announced bodies, in the order of their turns. A body that a trainer waits for always gets a
        place."""
        self.starved = False
        for attempt in sorted(self.announced, key=turn):
            if attempt not in self.announced:
                continue  # dropped to make room for an earlier one
            extent = self.placer.space.alloc(attempt.nbytes)
            if extent is None and attempt.ticket.number == attempt.ticket.stream.awaited:
                extent = self.placer.room_for_awaited(
                    attempt.nbytes, self.streams.values(), self._placed, self._drop_for_room
                )
            if extent is None:
                self.starved = True
                continue
            attempt.extent, attempt.state, attempt.granted_at = extent, AttemptState.GRANTED, now
            del self.announced[attempt]
            ticket = attempt.ticket
            self._send(
                attempt.feeder,
                FrameKind.GRANT,
                stream=ticket.stream.id,
                ticket=ticket.number,
                room=extent.nbytes,
            )

    def _placed(self) -> list[Attempt]:
        attempts = [a for feeder in self.feeders.values() for a in feeder.attempts.values()]
        return [a for a in attempts if a.extent is not None]

    def _drop_for_room(self, attempt: Attempt) -> None:
        self.drop_attempt(attempt, cancel=True)

    def fail(self, ticket: Ticket, payload: bytes, *, is_own: bool = False) -> None:
        """Fails a ticket. The trainer raises the error at the ticket's turn. `is_own`: this receiver gave up the
        ticket, so the payload does not come from a feeder."""
        self.counters.failures += 1
        self._conclude(ticket, Fail(ticket.stream.id, ticket.number, payload, is_own))

    def say_end(self, ticket: Ticket, batches: int) -> None:
        """Reports that a ticket yields no batch, because its slot ends after `batches` batches."""
        self._conclude(ticket, End(ticket.stream.id, ticket.number, batches))

    def say_there(self, ticket: Ticket) -> None:
        """Reports that a batch exists, for a ticket that only asks whether it does."""
        self._conclude(ticket, SayThere(ticket.stream.id, ticket.number))

    def _conclude(self, ticket: Ticket, answer: Fail | End | SayThere) -> None:
        for attempt in ticket.attempts[:]:
            self.drop_attempt(attempt, cancel=True, requeue=False)
        ticket.move(TicketEvent.FAIL)
        self._out.append(answer)

    def fail_service(self, ticket: Ticket, error: str, message: str) -> None:
        """Fails a ticket with one of this package's errors. `error`: the name of the error's class."""
        self.fail(ticket, supervision.pack_failure(error, message), is_own=True)

    def release(self, stream: Stream) -> None:
        """Reports to feeders and to the parent that a closed stream no longer uses its bundles."""
        used = {bundle for other in self.streams.values() for bundle in other.manifests()}
        if stream.bundle not in used:
            self._out.append(Released(stream.bundle))
        for bundle in stream.manifests().keys() - used:
            for feeder in self.feeders.values():
                if bundle in feeder.bundles:
                    feeder.bundles.discard(bundle)
                    self._send(feeder, FrameKind.RELEASE, bundle=bundle)

    def send_bundle(self, feeder: FeederState, bundle: bytes) -> None:
        for stream in self.streams.values():
            if (manifest := stream.manifests().get(bundle)) is not None:
                self._send(feeder, FrameKind.BUNDLE, manifest, bundle=bundle)
                return

    def send_asked_bundles(self) -> None:
        """Sends each feeder the manifests that it has requested since the last call."""
        for feeder in self.feeders.values():
            while feeder.asked_bundles:
                self.send_bundle(feeder, feeder.asked_bundles.pop())

    def compare(self, stream: Stream, feeder: FeederState) -> None:
        if note := self._versions.compare(stream, feeder):
            self._out.append(Note(note))

    def saw_size(self, stream: Stream, nbytes: int) -> None:
        before = stream.size_hint
        stream.saw_size(nbytes)
        if stream.size_hint > before:
            self.placer.fit(self.streams.values(), nbytes)
