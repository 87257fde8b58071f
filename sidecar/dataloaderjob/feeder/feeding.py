"""The protocol machine of one feeder and all its receivers: decides what happens to tickets. Pure.

Events go in (a frame arrived, a batch is built, a body is sent), instructions come out. The machine never inspects
payloads. Each bundle has its own builder, which makes one batch at a time. The shell, `feeder.server`, reports which
builders are free. Every ticket is a `Task` whose state changes only by the table in `feeding_states`.

Turns go round robin over receivers, within a receiver round robin over streams, within a stream by ticket.
Nothing is built for a receiver with `limit` batches HELD, or with `limit` built and unsent. One exception prevents a
deadlock: a ticket before all HELD ones of its stream is built anyway, because the receiver may make no room for the
later ones until it has this one. Once `most_nbytes` are built for all receivers together, only a receiver with
nothing built gets a batch: batches built for the others may wait for a trainer that waits for this one.
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
"""Limit on the bytes of built and unsent batches: two batches of 38.5 MB for each of 64 receivers were 4.9 GB."""
BUILT = frozenset({State.HELD, State.READY, State.SENDING})
Free = Callable[[Task], bool]
"""Returns True if a builder may make this task now."""


class _Receiver:
    """Tickets of one connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tasks: dict[tuple[int, int], Task] = {}
        """(stream, ticket) -> the task that a frame refers to, in any state up to READY except DISCARDED."""
        self.queues: dict[int, list[Task]] = {}
        """stream -> QUEUED tasks, sorted by ticket. The streams take turns in the dict's order."""
        self.held: list[Task] = []
        self.unsent: set[Task] = set()
        """Tasks that are READY or SENDING."""
        self.asked: set[bytes] = set()
        self.uses: dict[bytes, int] = {}
        """bundle -> stream of its latest ticket, until the receiver releases the bundle."""

    def candidate(self, limit: int, free: Free) -> Task | None:
        """Returns the task to build next, or None."""
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
        """Removes the task; with `turn`, its stream moves to the end of the line."""
        queue = self.queues[task.stream]
        queue.remove(task)
        if not queue:
            del self.queues[task.stream]
        elif turn and len(self.queues) > 1:
            self.queues[task.stream] = self.queues.pop(task.stream)


class Feeding:
    """The machine. Its methods are events; they return instructions to be followed in order."""

    def __init__(self, limit: int, most_nbytes: int = MOST_NBYTES) -> None:
        """Starts without receivers. `limit`: most built batches of a receiver; 2 are one being sent and one ready."""
        self._limit, self._most_nbytes = limit, most_nbytes
        self.built_nbytes = 0
        """Bytes of built and unsent batches."""
        self._receivers: dict[int, _Receiver] = {}
        self._turns: deque[_Receiver] = deque()
        self._known: set[bytes] = set()
        self._coming: set[bytes] = set()
        self._parked: dict[bytes, list[Task]] = {}
        self._building = 0
        self._queued = 0
        self.freed: list[Any] = []
        """Bodies that were sent or given up; the shell collects them."""
        self._serial = 0
        self._history: deque[tuple[int, Event]] = deque(maxlen=_HISTORY)

    @property
    def load(self) -> int:
        """Number of tickets queued or being built for all receivers. Receivers compare feeders by it."""
        return self._queued + sum(map(len, self._parked.values())) + self._building

    @property
    def idle(self) -> bool:
        """True if no receiver is owed anything."""
        return not self.load and not any(k.held or k.unsent for k in self._receivers.values())

    # Receivers

    def opened(self, receiver: int) -> None:
        self._receivers[receiver] = made = _Receiver(receiver)
        self._turns.append(made)

    def closed(self, receiver: int) -> None:
        """The connection ended. Reporting it twice is safe."""
        gone = self._receivers.get(receiver)
        if gone is None:
            return
        for task in dict.fromkeys((*gone.tasks.values(), *gone.unsent)):  # a READY task is in both
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
        """A TICKET frame arrived. A repeated ticket only adds its flags and raises the room."""
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
        """A GRANT frame arrived. It only raises the room of a batch that is not built (asked again once announced)."""
        task = self.find(receiver, stream, ticket)
        if task is None:
            return []
        task.room = max(task.room, room)
        was = task.state
        self._move(task, Event.GRANT)
        return [Send(task)] if was is State.HELD else []

    def cancel(self, receiver: int, *, stream: int, ticket: int) -> list[Instruction]:
        """A CANCEL frame arrived: the ticket is forgotten, unless part of its body is already sent."""
        task = self.find(receiver, stream, ticket)
        return [] if task is None else self._cancel(task)

    # Bundles

    def bundle_coming(self, bundle: bytes) -> bool:
        """A BUNDLE frame arrived. Returns True, once per bundle, if the shell has to make it ready and report it."""
        if bundle in self._known or bundle in self._coming or not self.wanted(bundle):
            return False
        self._coming.add(bundle)
        return True

    def bundle_ready(self, bundle: bytes) -> None:
        """The bundle's blobs are on this node: its parked tickets are queued."""
        self._coming.discard(bundle)
        self._known.add(bundle)
        for task in self._parked.pop(bundle, ()):
            self._move(task, Event.BUNDLE)

    def bundle_lost(self, bundle: bytes) -> list[Instruction]:
        """The bundle cannot be obtained: its tickets fail. Also reported if nobody wants the bundle any more."""
        self._coming.discard(bundle)
        for owner in self._receivers.values():
            owner.asked.discard(bundle)
        lost = self._parked.pop(bundle, [])
        for task in lost:
            self._move(task, Event.BUNDLE_LOST)
        return [Fail(task) for task in lost]

    def known(self, bundle: bytes) -> bool:
        """True if the bundle's blobs are on this node."""
        return bundle in self._known

    def wanted(self, bundle: bytes) -> bool:
        """True if tickets wait for the bundle's blobs."""
        return bundle in self._parked

    def waiting(self, bundle: bytes) -> list[Task]:
        """Returns each receiver's earliest unbuilt ticket of this bundle. A note about the bundle concerns these."""
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
        """A RELEASE frame arrived: the receiver sends no further ticket of this bundle."""
        owner = self._receivers.get(receiver)
        if owner is not None:
            owner.uses.pop(bundle, None)

    def used(self, bundle: bytes) -> bool:
        """True if any receiver may still send tickets of this bundle."""
        return any(bundle in owner.uses for owner in self._receivers.values())

    def users(self, bundle: bytes) -> list[tuple[int, int]]:
        """Returns (receiver, stream) for each receiver that may still send tickets of this bundle."""
        return [
            (owner.number, owner.uses[bundle]) for owner in self._receivers.values() if bundle in owner.uses
        ]

    def bundle_failed(self, bundle: bytes) -> list[Instruction]:
        """The bundle cannot be loaded, or its worker_init_fn failed: its queued tickets fail."""
        queued = [
            task for owner in self._receivers.values() for queue in owner.queues.values() for task in queue
            if task.bundle == bundle
        ]  # fmt: skip
        for task in queued:
            self._move(task, Event.FAILED)
        return [Fail(task) for task in queued]

    # Building and sending

    def next_build(self, free: Free) -> Task | None:
        """Returns the task to build now; None until something changes."""
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
        """The builder made a body of `nbytes` bytes."""
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
        """The last byte of the body is sent, or the receiver has copied it. Ignored if the receiver has ended."""
        if task.state is not State.GONE:
            self._move(task, Event.SENT)

    # Within

    def find(self, receiver: int, stream: int, ticket: int) -> Task | None:
        """Returns the task that a frame refers to; None if it does not exist (any more)."""
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
        """Changes the task's state and updates the collections and counts that it is part of."""
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
