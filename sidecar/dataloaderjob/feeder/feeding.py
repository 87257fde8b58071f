"""What a feeder does with its tickets: the protocol machine of one feeder and all its receivers. Pure.

Events go in (a frame came, a batch is built, a body is sent), instructions come out; payloads are never
looked at. Each bundle has a builder of its own, which makes one batch at a time: the shell says which are
free. The shell is `feeder.server`. Every ticket is a `Task` whose state changes by the table in
`feeding_states` only.

Turns go round robin over receivers, within a receiver round robin over streams, within a stream by ticket.
A receiver with `limit` batches HELD, or as many built and unsent, gets nothing built. One exception keeps a
receiver from waiting for ever: the ticket before all HELD ones of its stream is built nevertheless,
because the receiver may give no room to the later ones until it has this one. With more than `most_nbytes` built for
all receivers together, only one that has nothing built gets a batch: what is built for others may wait for a trainer
that waits for this one.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

from dataloaderjob.feeder.feeding_states import (
    TRANSITIONS,
    Announce,
    Event,
    Fail,
    IllegalTransition,
    Instruction,
    Lost,
    NeedBundle,
    Send,
    State,
    Task,
    Withdraw,
)

_HISTORY = 64
MOST_NBYTES = 1 << 30
"""Bytes of batches that may be built and not sent: with 64 receivers of two each, 38.5 MB batches were 4.9 GB."""
BUILT = frozenset({State.HELD, State.READY, State.SENDING})
Free = Callable[[Task], bool]
"""Whether a builder may make this task now."""


class _Receiver:
    """Tickets of one connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tasks: dict[tuple[int, int], Task] = {}
        """(stream, ticket) -> the task that a frame means: any state up to READY, not DISCARDED."""
        self.queues: dict[int, list[Task]] = {}
        """stream -> QUEUED tasks by ticket; the dict's order is the order of turns."""
        self.held: list[Task] = []
        self.unsent: set[Task] = set()
        """READY and SENDING."""
        self.asked: set[bytes] = set()
        self.uses: dict[bytes, int] = {}
        """Bundles of which tickets came, until they are released, with the stream of the last one."""

    def candidate(self, limit: int, free: Free) -> Task | None:
        """The task to build next, or None."""
        if len(self.unsent) >= limit:
            return None
        for stream, queue in self.queues.items():
            task = next((task for task in queue if free(task)), None)  # slots have builders of their own
            if task is None:
                continue
            if len(self.held) < limit or all(h.ticket > task.ticket for h in self.held if h.stream == stream):
                return task
        return None

    def enqueue(self, task: Task) -> None:
        insort(self.queues.setdefault(task.stream, []), task, key=lambda j: j.ticket)

    def dequeue(self, task: Task, *, turn: bool = False) -> None:
        """Takes the task out; with `turn`, the stream goes to the end of the line."""
        queue = self.queues[task.stream]
        queue.remove(task)
        if not queue:
            del self.queues[task.stream]
        elif turn and len(self.queues) > 1:
            self.queues[task.stream] = self.queues.pop(task.stream)


class Feeding:
    """The machine. Methods are events and return instructions, in the order in which to follow them."""

    def __init__(self, limit: int, most_nbytes: int = MOST_NBYTES) -> None:
        """`limit`: built batches that a receiver may hold; 2 are one being sent and one ready behind it."""
        self._limit, self._most_nbytes = limit, most_nbytes
        self.built_nbytes = 0
        """Bytes of batches that are built and not sent."""
        self._receivers: dict[int, _Receiver] = {}
        self._turns: deque[_Receiver] = deque()
        self._known: set[bytes] = set()
        self._coming: set[bytes] = set()
        self._parked: dict[bytes, list[Task]] = {}
        self._building = 0
        self._queued = 0
        self.freed: list[Any] = []
        """Bodies that are sent or given up; the shell takes them out."""
        self._serial = 0
        self._history: deque[tuple[int, Event]] = deque(maxlen=_HISTORY)

    @property
    def load(self) -> int:
        """Tickets queued or being built, of all receivers: what a receiver compares feeders by."""
        return self._queued + sum(map(len, self._parked.values())) + self._building

    @property
    def idle(self) -> bool:
        """Whether nothing is owed to anybody."""
        return not self.load and not any(k.held or k.unsent for k in self._receivers.values())

    # Receivers

    def opened(self, receiver: int) -> None:
        self._receivers[receiver] = made = _Receiver(receiver)
        self._turns.append(made)

    def closed(self, receiver: int) -> None:
        """The connection ended; safe to report twice."""
        gone = self._receivers.get(receiver)
        if gone is None:
            return
        for task in dict.fromkeys((*gone.tasks.values(), *gone.unsent)):  # a READY one is in both
            self._move(task, Event.CANCEL)
        del self._receivers[receiver]
        self._turns.remove(gone)

    # Frames

    def ticket(
        self,
        receiver: int,
        *,
        stream: int,
        ticket: int,
        bundle: bytes,
        flags: int,
        room: int,
        payload: bytes,
    ) -> list[Instruction]:
        """A TICKET frame. The same ticket again only raises its room."""
        owner = self._receivers[receiver]
        owner.uses[bundle] = stream
        known = owner.tasks.get((stream, ticket))
        if known is not None:
            known.flags |= flags
            return self._widen(known, room)
        self._serial += 1
        state = State.QUEUED if bundle in self._known else State.PARKED
        task = Task(self._serial, receiver, stream, ticket, bundle, flags, room, payload, state)
        owner.tasks[stream, ticket] = task
        if state is State.QUEUED:
            owner.enqueue(task)
            self._queued += 1
            return []
        self._parked.setdefault(bundle, []).append(task)
        if bundle not in self._coming and bundle not in owner.asked:
            owner.asked.add(bundle)
            return [NeedBundle(task)]
        return []

    def grant(self, receiver: int, *, stream: int, ticket: int, room: int) -> list[Instruction]:
        """A GRANT frame. For a batch not yet built (asked again after its announcement) it is room."""
        task = self.find(receiver, stream, ticket)
        if task is None:
            return []
        task.room = max(task.room, room)
        was = task.state
        self._move(task, Event.GRANT)
        return [Send(task)] if was is State.HELD else []

    def cancel(self, receiver: int, *, stream: int, ticket: int) -> list[Instruction]:
        """A CANCEL frame: the ticket is forgotten, unless a part of its body is out."""
        task = self.find(receiver, stream, ticket)
        return [] if task is None else self._cancel(task)

    # Bundles

    def bundle_coming(self, bundle: bytes) -> bool:
        """A BUNDLE frame. Returns whether the shell has to make it ready and report it; once for each bundle."""
        if bundle in self._known or bundle in self._coming or not self.wanted(bundle):
            return False
        self._coming.add(bundle)
        return True

    def bundle_ready(self, bundle: bytes) -> None:
        """Its blobs are on this node: parked tickets take their turns."""
        self._coming.discard(bundle)
        self._known.add(bundle)
        for task in self._parked.pop(bundle, ()):
            self._move(task, Event.BUNDLE)

    def bundle_lost(self, bundle: bytes) -> list[Instruction]:
        """The bundle cannot be had: its tickets fail. Also ends the coming of a bundle that nobody wants."""
        self._coming.discard(bundle)
        for owner in self._receivers.values():
            owner.asked.discard(bundle)
        lost = self._parked.pop(bundle, [])
        for task in lost:
            self._move(task, Event.BUNDLE_LOST)
        return [Fail(task) for task in lost]

    def known(self, bundle: bytes) -> bool:
        """Whether its blobs are here."""
        return bundle in self._known

    def wanted(self, bundle: bytes) -> bool:
        """Whether tickets wait for its blobs."""
        return bundle in self._parked

    def waiting(self, bundle: bytes) -> list[Task]:
        """The earliest unbuilt ticket of this bundle on each receiver: whom a note about it concerns."""
        first: dict[int, Task] = {}
        for owner in self._receivers.values():
            for task in owner.tasks.values():
                if task.bundle == bundle and task.state in (State.PARKED, State.QUEUED, State.BUILDING):
                    first.setdefault(owner.number, task)
        return list(first.values())

    def forget_bundle(self, bundle: bytes) -> bool:
        """Makes a bundle unknown again. Returns False, and does nothing, while a ticket needs it."""
        if self.waiting(bundle):
            return False
        self._known.discard(bundle)
        for owner in self._receivers.values():
            owner.asked.discard(bundle)
        return True

    def release(self, receiver: int, bundle: bytes) -> None:
        """A RELEASE frame: that receiver sends no further ticket of this bundle."""
        owner = self._receivers.get(receiver)
        if owner is not None:
            owner.uses.pop(bundle, None)

    def used(self, bundle: bytes) -> bool:
        """Whether any receiver may still send tickets of this bundle."""
        return any(bundle in owner.uses for owner in self._receivers.values())

    def users(self, bundle: bytes) -> list[tuple[int, int]]:
        """(receiver, stream) of those that may still send tickets of this bundle."""
        return [
            (owner.number, owner.uses[bundle]) for owner in self._receivers.values() if bundle in owner.uses
        ]

    def bundle_failed(self, bundle: bytes) -> list[Instruction]:
        """The bundle cannot be loaded, or its worker_init_fn failed: tickets that wait for it fail."""
        queued = [
            task for owner in self._receivers.values() for queue in owner.queues.values() for task in queue
            if task.bundle == bundle
        ]  # fmt: skip
        for task in queued:
            self._move(task, Event.FAILED)
        return [Fail(task) for task in queued]

    # Building and sending

    def next_build(self, free: Free) -> Task | None:
        """The task to build now, or None until something changes."""
        limit = 1 if self.built_nbytes >= self._most_nbytes else self._limit
        for _ in range(len(self._turns)):
            owner = self._turns[0]
            self._turns.rotate(-1)
            task = owner.candidate(limit, free)
            if task is not None:
                self._move(task, Event.BUILD)
                return task
        return None

    def built(self, task: Task, nbytes: int) -> list[Instruction]:
        """The builder has made a body of `nbytes`."""
        task.nbytes = nbytes
        self._move(task, Event.FITS if nbytes <= task.room else Event.EXCEEDS)
        if task.state is State.GONE:
            return []
        return [Send(task)] if task.state is State.READY else [Announce(task)]

    def failed(self, task: Task) -> list[Instruction]:
        """User code failed while the builder made this task."""
        live = task.state is State.BUILDING
        self._move(task, Event.FAILED)
        return [Fail(task)] if live else []

    def lost(self, task: Task) -> list[Instruction]:
        """The builder ended while it made this task."""
        live = task.state is State.BUILDING
        self._move(task, Event.LOST)
        return [Lost(task)] if live else []

    def started(self, task: Task) -> None:
        self._move(task, Event.START)

    def sent(self, task: Task) -> None:
        """The last byte of the body is out, or the receiver has copied it. Ignored if the receiver has ended."""
        if task.state is not State.GONE:
            self._move(task, Event.SENT)

    # Within

    def find(self, receiver: int, stream: int, ticket: int) -> Task | None:
        """The task that a frame means; None if there is none (any more)."""
        owner = self._receivers.get(receiver)
        return None if owner is None else owner.tasks.get((stream, ticket))

    def _widen(self, task: Task, room: int) -> list[Instruction]:
        task.room = max(task.room, room)
        if task.state is State.HELD and task.nbytes <= task.room:
            self._move(task, Event.GRANT)
            return [Send(task)]
        return []

    def _cancel(self, task: Task) -> list[Instruction]:
        was = task.state
        self._move(task, Event.CANCEL)
        return [Withdraw(task)] if was is State.READY else []

    def _move(self, task: Task, event: Event) -> None:
        """Changes the state, and the places where the task is counted."""
        self._history.append((task.serial, event))
        state = TRANSITIONS.get((task.state, event))
        if state is None:
            raise IllegalTransition(task, event, self._history)
        if state is task.state:
            return
        owner = self._receivers.get(task.receiver)
        was, task.state = task.state, state
        if was in (State.BUILDING, State.DISCARDED) and state is not State.DISCARDED:
            self._building -= 1
        self.built_nbytes += task.nbytes * ((state in BUILT) - (was in BUILT))
        if owner is not None:
            self._leave(owner, task, was)
            self._enter(owner, task)
        if state is State.GONE and task.body is not None:
            self.freed.append(task.body)
            task.body = None

    def _leave(self, owner: _Receiver, task: Task, was: State) -> None:
        if was is State.QUEUED:
            owner.dequeue(task, turn=task.state is State.BUILDING)
            self._queued -= 1
        elif was is State.PARKED and task.bundle in self._parked:
            self._parked[task.bundle].remove(task)
            if not any(j.receiver == owner.number for j in self._parked[task.bundle]):
                owner.asked.discard(task.bundle)  # nobody may have answered: the next ticket asks again
            if not self._parked[task.bundle]:
                del self._parked[task.bundle]
        elif was is State.HELD:
            owner.held.remove(task)
        elif was in (State.READY, State.SENDING) and task.state is State.GONE:
            owner.unsent.discard(task)

    def _enter(self, owner: _Receiver, task: Task) -> None:
        if task.state is State.QUEUED:
            owner.enqueue(task)
            self._queued += 1
        elif task.state is State.BUILDING:
            self._building += 1
        elif task.state is State.HELD:
            owner.held.append(task)
        elif task.state is State.READY:
            owner.unsent.add(task)
        elif owner.tasks.get((task.stream, task.ticket)) is task:
            del owner.tasks[task.stream, task.ticket]  # frames no longer mean it
