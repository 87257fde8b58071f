"""The sessions that a feeder serves, each with a builder. No user code runs in this process.

The feeder's loop calls all methods. `channel` lists the phases of a session.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from dataloaderjob.core import digests, frames, supervision, ticket_codec
from dataloaderjob.core.blobs import SLOTS, Bundle
from dataloaderjob.core.costs import BatchCost, FeederCosts
from dataloaderjob.core.frames import Flag
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder import channel as ch
from dataloaderjob.feeder import dealing
from dataloaderjob.feeder.bundles import LOADING, Templates, is_due
from dataloaderjob.feeder.channel import (
    Body,
    BuilderPhase,
    Channel,
    Introduction,
    Message,
    MessageKind,
    Session,
    SharedBuffer,
    SlotSession,
    Template,
    Watching,
)
from dataloaderjob.feeder.dealing import Needs
from dataloaderjob.feeder.ends import End, Ends
from dataloaderjob.feeder.feeding_states import Task, TaskState
from dataloaderjob.feeder.slot_snapshots import SlotSnapshots, SnapshotReceiver
from dataloaderjob.feeder.trials import Trials

LINGER_S = 0.2
"""Delay before a session's builder is ended. Ending it at once would delay the next epoch's first batches by a few
ms."""
END_GRACE_S = 2.0
"""Time that user code has to finish its current step after its session has ended."""
HUNG_S = 5.0
"""Time after a batch is cancelled until a builder that is still making it is killed."""
ORPHAN_S = 10.0
"""Time for which a session is kept after its receivers are gone, because a receiver may reconnect."""
SLOT_ORPHAN_S = 60.0
"""Time for which a slot's session is kept after its receivers are gone. It is long because a slot would have to be
rebuilt, and because a receiver that has reconnected may request nothing for a while."""
MAX_FIRST_DEATHS = 2
"""Number of builders of a session that must die in worker_init_fn before the session fails."""


class Owner(SnapshotReceiver, Watching, Protocol):
    """The feeder's loop, which handles builders' events. Its methods are called within the loop's turns."""

    def session_free(self) -> None: ...
    def built(self, task: Task, body: Body) -> None: ...
    def failed(self, task: Task, payload: bytes, flags: int) -> None: ...
    def lost(self, task: Task, position: int, end: End) -> None: ...
    def out_of_memory(self, text: str) -> None: ...
    def progress(self, task: Task, position: int) -> None: ...
    def bundle_failed(self, bundle: bytes, payload: bytes) -> None: ...
    def session_gone(self, bundle: bytes) -> None: ...
    def soon(self, call: Callable[[], None]) -> None: ...
    def receivers_of(self, bundle: bytes) -> set[int]: ...


class Builders:
    """All sessions of one feeder, by `Bundle.id`."""

    def __init__(
        self, settings: FeederSettings, requests: socket.socket, owner: Owner, *, relayed: bool
    ) -> None:
        """`requests`: the socket to the zygote. `relayed`: user code writes to this process's output, not to the
        host's."""
        self._ends = Ends(settings.memory_field)
        self.templates = Templates(settings, requests, owner, self, relayed=relayed)
        self._settings, self._owner, self._relayed = settings, owner, relayed
        self._trials = Trials(owner, self.templates)
        self._snapshots = SlotSnapshots(self._trials, owner)
        self._sessions: dict[bytes, Session] = {}
        self._first_deaths: dict[bytes, int] = {}
        self.needs = Needs()
        self.costs = FeederCosts()

    # The feeder's side

    def has(self, bundle: bytes) -> bool:
        return bundle in self._sessions

    def free(self, task: Task) -> bool:
        """Returns True if a builder may start on this task now."""
        session = self._sessions.get(task.bundle)
        if session is None or session.phase is not BuilderPhase.FREE:
            return False
        bundle, slot = session.bundle, session.slot
        if not bundle.ranks or (slot is not None and slot.has_ended):
            return True
        return self.needs.may_make(bundle, _slot_ticket(task).number)

    def discards(self, bundle: bytes) -> bool:
        """Returns True if the bundle's builder is making a batch that has since been cancelled."""
        session = self._sessions.get(bundle)
        return session is not None and session.task is not None and session.task.state is TaskState.DISCARDED

    def busy(self) -> Iterator[tuple[Task, int]]:
        """Yields each task that a builder is working on, with the number of batches that were rebuilt for it."""
        yield from ((s.task, s.replayed) for s in self._sessions.values() if s.task is not None)

    def open(self, bundle: Bundle, base_seed: int) -> None:
        """Begins a session for a bundle whose blobs are on this node. `Owner.session_free` reports when the session can
        be used."""
        template = self.templates.get(bundle)
        session = self._sessions[bundle.id] = Session(bundle, template, base_seed, time.monotonic())
        template.sessions.append(session)
        if template.loaded:
            self._start(session)

    def hear(self, bundle: bytes, receiver: int, payload: bytes) -> None:
        """Records which batches a rank still needs, according to a ticket that has arrived."""
        session = self._sessions.get(bundle)
        if session is None or not session.bundle.ranks:
            return
        if (ticket := ticket_codec.unpack_slot_ticket(payload)) is not None:
            self.needs.hear(session.bundle, receiver, ticket.needed)

    def build(self, task: Task) -> None:
        """Gives a batch to the builder of a FREE session."""
        session = self._sessions[task.bundle]
        session.phase, session.task = BuilderPhase.BUSY, task
        payload = task.payload
        if session.bundle.ranks:
            ticket = _slot_ticket(task)
            if why := self._why_not(session, task.receiver, ticket):
                self._owner.soon(functools.partial(self._refuse, session, task, why))
                return
            self.needs.hear(session.bundle, task.receiver, ticket.needed)
            payload = self.needs.of_all(session.bundle, ticket, payload)
        if session.channel is not None:
            session.channel.post(
                MessageKind.BUILD, a=task.serial, b=task.ticket, flags=task.flags, payload=payload
            )

    def _why_not(self, session: Session, receiver: int, ticket: ticket_codec.SlotTicket) -> str:
        """Returns the reason to refuse a rank's ticket for a shared slot; empty if there is none."""
        if ticket.base_seed != session.base_seed:
            return dealing.SEEDS
        others = (s.bundle for s in self._sessions.values() if s.phase is not BuilderPhase.ENDING)
        return dealing.refusal(session.bundle, receiver, ticket.needed, others, self._owner.receivers_of)

    def _refuse(self, session: Session, task: Task, why: str) -> None:
        if session.task is task:
            self._finished(session)
            self._owner.failed(task, supervision.pack_failure("InputError", why), 0)

    def release(self, body: Body) -> None:
        """Returns a body's buffer to its builder, after the body was sent or dropped."""
        body.view.release()
        if body.session.channel is not None:
            body.session.channel.post(MessageKind.FREE, a=body.buffer)

    def acknowledge(self, task: Task) -> None:
        """Acknowledges a builder's PROGRESS, once the frame that `Owner.progress` queued has been sent."""
        session = self._sessions.get(task.bundle)
        if session is not None and session.task is task and session.channel is not None:
            session.channel.post(MessageKind.ACK)

    def end(self, bundle: bytes) -> None:
        """Ends a session that no receiver needs any longer."""
        self.needs.forget(bundle)
        session = self._sessions.get(bundle)
        if session is None or session.phase is BuilderPhase.ENDING:
            return
        if session.channel is None:
            if session.task is None:
                self._forget(session)
            else:
                self._died(session, End("was terminated"), ch.NOWHERE)
            return
        session.phase, session.ended_at = BuilderPhase.ENDING, time.monotonic()

    def end_lingering(self, bundle: bytes) -> None:
        """Ends a lingering session at once. The session is needed again, and can begin again only after it has
        ended."""
        session = self._sessions.get(bundle)
        if session is not None and session.phase is BuilderPhase.ENDING:
            self._end_builder(session, time.monotonic())

    def end_unused(self, used: Callable[[bytes], bool]) -> None:
        """Ends the sessions that are not used, for example because their receivers have not reconnected."""
        for bundle in list(self._sessions):
            if not used(bundle):
                self.end(bundle)

    def tick(self, now: float, used: Callable[[bytes], bool], waiting: Callable[[bytes], list[Task]]) -> None:
        """Ends unused sessions, kills builders that hang, and ends overdue trials. Call about twice a second. `used`:
        returns True if a bundle is in use. `waiting`: returns the first unbuilt tasks of a bundle."""
        self._ends.look()
        self._trials.tick(now)
        self.costs.slots = sum(session.slot is not None for session in self._sessions.values())
        for bundle, session in list(self._sessions.items()):
            if session.phase is BuilderPhase.ENDING:
                if now - session.ended_at > LINGER_S:
                    self._end_builder(session, now)
            else:
                self._check_use(session, now, used(bundle))
            if session.phase is BuilderPhase.BUSY:
                if not self.discards(bundle) or _is_asked_again(session, waiting(bundle)):
                    session.deadline = float("inf")
                elif session.deadline == float("inf"):
                    session.deadline = now + HUNG_S
            if now >= session.deadline:
                self._kill(session)

    def notes(self, now: float) -> Iterator[tuple[bytes, str]]:
        """Yields (bundle, text) for each note that is due about sessions that are slow to begin."""
        for bundle, session in self._sessions.items():
            since = session.since
            if session.phase not in (BuilderPhase.LOADING, BuilderPhase.STARTING):
                continue
            if is_due(now, since, session.noted_at):
                session.noted_at = now
                loading = f"is loading user code and data ({session.bundle.nbytes / 1e6:.1f} MB)"
                what = loading if session.phase is BuilderPhase.LOADING else "runs worker_init_fn"
                yield bundle, f"{what}{frames.SINCE}{now - since:.0f} s"

    # Templates

    def loaded(self, template: Template) -> None:
        for session in template.sessions[:]:
            self._start(session)

    def load_failed(self, template: Template, payload: bytes) -> None:
        for session in template.sessions[:]:
            self._forget(session)
            self._owner.bundle_failed(session.bundle.id, payload)

    def template_ended(self, template: Template) -> None:
        end = self._ends.unknown("ended with the process that had loaded its dataset")
        for session in template.sessions[:]:
            self._died(session, end, ch.NOWHERE)

    def loading_ended(self) -> End:
        end = self._ends.unknown("ended while doing so")
        if end.of_memory:
            self._owner.out_of_memory(f"{LOADING} {end.text}")
        return end

    def builder_ended(self, template: Template, message: Message) -> None:
        code, serial, position = ch.ENDED.unpack(message.payload)
        session = next((s for s in template.sessions if s.number == message.a), None)
        if session is None:
            return
        if session.task is None or session.task.serial != serial:
            position = ch.NOWHERE
        self._died(session, self._ends.of_code(code), position)

    # Builders

    def _start(self, session: Session) -> None:
        """Assigns a builder to the session."""
        number, channel = self.templates.builder(session.template)
        session.number, session.channel, session.phase = number, channel, BuilderPhase.STARTING
        self._owner.watch(channel, lambda: self._listen(session, channel))
        slot, index = session.bundle.slot, self._settings.index
        if session.bundle.facts.get(SLOTS):  # a stage has as many workers as the reading before it
            index = index % max(1, session.bundle.workers) if slot is None else slot
        introduction = Introduction(
            feeder=self._settings.name, index=index,
            base_seed=session.base_seed, num_workers=session.bundle.workers or self._settings.num_feeders,
            allow_pickle=session.bundle.allow_pickle, is_slot=slot is not None, env=session.bundle.env,
            ranks=session.bundle.ranks, held=session.bundle.held,
        )  # fmt: skip
        session.introduction = introduction.pack()
        session.slot = None if slot is None else SlotSession()
        channel.post(MessageKind.INIT, payload=session.introduction, fd=os.dup(1) if self._relayed else None)

    def _listen(self, session: Session, channel: Channel) -> None:
        """Handles a builder's messages. The template reports the builder's exit."""
        if session.channel is not channel:
            return
        messages, alive = channel.read()
        channel.flush()
        for message in messages:
            self._message(session, message)
        if not alive and session.channel is channel:
            self._close(session)

    def _message(self, session: Session, message: Message) -> None:
        task = session.task
        if message.kind == MessageKind.UP:
            self._first_deaths.pop(session.bundle.id, None)
            session.phase = BuilderPhase.FREE
            self._owner.session_free()
        elif message.kind == MessageKind.INIT_FAILED:
            self.end(session.bundle.id)
            self._owner.bundle_failed(session.bundle.id, message.payload)
        elif message.kind == MessageKind.BUFFER and message.fd is not None:
            session.buffers[message.a] = SharedBuffer(message.fd, message.b)
        elif message.kind == MessageKind.DROP:
            session.buffers.pop(message.a, None)
        elif message.kind == MessageKind.SNAPSHOT:
            self._snapshots.received(session, message)
        elif message.kind == MessageKind.REPLAYED:
            session.replayed = message.b
        elif message.kind == MessageKind.NO_STATE:
            self._snapshots.say(session, message.payload.decode(errors="replace"))
        elif task is None or message.a != task.serial:
            return
        elif message.kind == MessageKind.PROGRESS:
            self._owner.progress(task, message.b)
        elif message.kind == MessageKind.BUILT:
            number, nbytes = ch.BUILT.unpack_from(message.payload)
            if (cost := BatchCost.unpack(message.payload, ch.BUILT.size)) is not None:
                self.costs.add(cost)
            memory = session.buffers[number]
            body = Body(session, number, memoryview(memory.map)[:nbytes], memory)
            self._finished(session)
            self.templates.fork_ahead(session.template, nbytes)
            slot = session.slot
            if slot is not None and slot.is_exact is None and slot.first is not None and not slot.is_tried:
                self._snapshots.try_first(session, slot, task, digests.of_body(body.view))
            self._owner.built(task, body)
        elif message.kind == MessageKind.FAILED:
            self._finished(session)
            if session.slot is not None and message.flags & Flag.ENDED and frames.says_end(message.payload):
                session.slot.has_ended = True
            self._owner.failed(task, message.payload, message.flags)

    def _finished(self, session: Session) -> None:
        session.task, session.deadline, session.replayed = None, float("inf"), 0
        if session.phase is BuilderPhase.BUSY:
            session.phase = BuilderPhase.FREE

    def _died(self, session: Session, end: End, position: int) -> None:
        was, task = session.phase, session.task
        self._forget(session)
        if end.of_memory:
            work = "runs worker_init_fn" if was is BuilderPhase.STARTING else "is waiting for work"
            if task is not None:
                work = f"is making {_describe(task, position)}"
            self._owner.out_of_memory(f"the process that {work} {end.text}")
        if task is not None:
            self._owner.lost(task, position, end)
        if was is BuilderPhase.STARTING and self._hopeless(session):
            who = f"{self._settings.name}: the process that runs worker_init_fn"
            self._owner.bundle_failed(session.bundle.id, end.failure(who, f", {MAX_FIRST_DEATHS} times"))
        else:
            self._owner.session_gone(session.bundle.id)

    def _hopeless(self, session: Session) -> bool:
        deaths = self._first_deaths.pop(session.bundle.id, 0) + 1
        if deaths < MAX_FIRST_DEATHS:
            self._first_deaths[session.bundle.id] = deaths
        return deaths >= MAX_FIRST_DEATHS

    def _check_use(self, session: Session, now: float, used: bool) -> None:
        if used:
            session.orphan_since = None
            return
        session.orphan_since = session.orphan_since or now
        if now - session.orphan_since > (ORPHAN_S if session.slot is None else SLOT_ORPHAN_S):
            self.end(session.bundle.id)

    def _kill(self, session: Session) -> None:
        session.deadline = float("inf")
        session.template.channel.post(MessageKind.KILL, a=session.number)

    def _end_builder(self, session: Session, now: float) -> None:
        if session.channel is not None:
            self._close(session)
            session.deadline = now + END_GRACE_S

    def _close(self, session: Session) -> None:
        """Closes the channel. The builder exits when it next reads from the channel."""
        if session.channel is not None:
            self._owner.unwatch(session.channel)
            session.channel.close()
            session.channel = None

    def _forget(self, session: Session) -> None:
        self._close(session)
        self._trials.end(session)
        template = session.template
        if self._sessions.get(session.bundle.id) is session:
            del self._sessions[session.bundle.id]
        template.used_at = time.monotonic()
        if session in template.sessions:
            template.sessions.remove(session)
        self.templates.trim()


def _slot_ticket(task: Task) -> ticket_codec.SlotTicket:
    ticket = ticket_codec.unpack_slot_ticket(task.payload)
    assert ticket is not None  # noqa: S101  its session is a slot's
    return ticket


def _is_asked_again(session: Session, waiting: list[Task]) -> bool:
    """Returns True if a slot's builder is making a cancelled batch that has been requested again. The builder must
    finish it before any other batch of the slot."""
    made = session.task
    return session.slot is not None and made is not None and any(t.ticket == made.ticket for t in waiting)


def _describe(task: Task, position: int) -> str:
    return f"{ticket_codec.describe_keys(task.payload, None if position < 0 else position)} of batch {task.ticket}"
