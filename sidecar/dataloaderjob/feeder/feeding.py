"""The state machine of one feeder and all its receivers. It decides how tickets are handled. Pure.

Events go in (a frame has arrived, a batch is built, a body is sent), and instructions come out. The machine never
inspects payloads. Each bundle has its own builder, which makes one batch at a time. The shell, `feeder.server`, reports
which builders are free. Every ticket is a `Task` whose state changes only as the table in `feeding_states` allows.

Receivers take turns, and so do the streams of each receiver. Within a stream, the lowest ticket comes first. Three
rules limit the number of built batches:

1. Nothing is built for a receiver with `limit` batches HELD, or with `limit` batches READY or SENDING.
2. A ticket before all HELD ones of its stream is built anyway. Otherwise, a deadlock could arise: the receiver may not
   make room for those until it has this one.
3. Once the batches for all receivers reach `most_nbytes`, `limit` is 1. It is never 0, because trainers wait for each
   other: one trainer may take its batches only after another trainer has its batch.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

from dataloaderjob.feeder.feeding_states import (
    TRANSITIONS,
    Announce,
    Fail,
    IllegalTransition,
    Instruction,
    Lost,
    NeedBundle,
    Send,
    Task,
    TaskEvent,
    TaskState,
    Withdraw,
)

_HISTORY = 64
MOST_NBYTES = 1 << 30
"""Limit on the bytes of built and unsent batches. Without it, two batches of 38.5 MB for each of 64 receivers took 4.9
GB."""
BUILT = frozenset({TaskState.HELD, TaskState.READY, TaskState.SENDING})
Free = Callable[[Task], bool]
"""Returns True if a builder may start on this task now."""


class _Receiver:
    """The tickets of one connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tasks: dict[tuple[int, int], Task] = {}
        """(stream, ticket) -> the task to which a frame refers. A task that is DISCARDED, SENDING or GONE is not
        included."""
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
        """Removes the task. With `turn`, the task's stream has its next turn after all other streams."""
        queue = self.queues[task.stream]
        queue.remove(task)
        if not queue:
            del self.queues[task.stream]
        elif turn and len(self.queues) > 1:
            self.queues[task.stream] = self.queues.pop(task.stream)


class Feeding:
    """The state machine. Its methods are events, and they return instructions to be followed in order."""

    def __init__(self, limit: int, most_nbytes: int = MOST_NBYTES) -> None:
        """Starts without receivers. `limit`: maximum number of built batches per receiver. 2 allows one that is being
        sent and one that is ready."""
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
        """Bodies that were sent or dropped; the shell collects them."""
        self._serial = 0
        self._history: deque[tuple[int, TaskEvent]] = deque(maxlen=_HISTORY)

    @property
    def load(self) -> int:
        """Number of tickets that wait or are being built, for all receivers. Receivers use it to compare feeders."""
        return self._queued + sum(map(len, self._parked.values())) + self._building

    @property
    def idle(self) -> bool:
        """True if no receiver is waiting for anything."""
        return not self.load and not any(k.held or k.unsent for k in self._receivers.values())

    @property
    def sending(self) -> bool:
        """True if a finished batch waits for a connection."""
        return any(k.unsent for k in self._receivers.values())

    # Receivers

    def opened(self, receiver: int) -> None:
        self._receivers[receiver] = made = _Receiver(receiver)
        self._turns.append(made)

    def closed(self, receiver: int) -> None:
        """Handles the end of a connection. Calling this twice is safe."""
        gone = self._receivers.get(receiver)
        if gone is None:
            return
        for task in dict.fromkeys((*gone.tasks.values(), *gone.unsent)):  # a READY task is in both
            self._move(task, TaskEvent.CANCEL)
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
        """Handles a TICKET frame. A repeated ticket only adds its flags and increases the room."""
        owner = self._receivers[receiver]
        owner.uses[bundle] = stream
        known = owner.tasks.get((stream, ticket))
        if known is not None:
            known.flags |= flags
            return self._widen(known, room)
        self._serial += 1
        state = TaskState.QUEUED if bundle in self._known else TaskState.PARKED
        task = Task(self._serial, receiver, stream, ticket, bundle, flags, room, payload, state)
        owner.tasks[stream, ticket] = task
        if state is TaskState.QUEUED:
            owner.enqueue(task)
            self._queued += 1
            return []
        self._parked.setdefault(bundle, []).append(task)
        if bundle not in self._coming and bundle not in owner.asked:
            owner.asked.add(bundle)
            return [NeedBundle(task)]
        return []

    def grant(self, receiver: int, *, stream: int, ticket: int, room: int) -> list[Instruction]:
        """Handles a GRANT frame. A batch that is HELD is sent. For a batch that is not built yet, only the room is
        increased."""
        task = self.find(receiver, stream, ticket)
        if task is None:
            return []
        task.room = max(task.room, room)
        was = task.state
        self._move(task, TaskEvent.GRANT)
        return [Send(task)] if was is TaskState.HELD else []

    def cancel(self, receiver: int, *, stream: int, ticket: int) -> list[Instruction]:
        """Handles a CANCEL frame. The ticket is forgotten, unless part of its body has already been sent."""
        task = self.find(receiver, stream, ticket)
        return [] if task is None else self._cancel(task)

    # Bundles

    def bundle_coming(self, bundle: bytes) -> bool:
        """Handles a BUNDLE frame. Returns True, once per bundle, if the shell must obtain the bundle's blobs and report
        the result."""
        if bundle in self._known or bundle in self._coming or not self.wanted(bundle):
            return False
        self._coming.add(bundle)
        return True

    def bundle_ready(self, bundle: bytes) -> None:
        """Handles the arrival of a bundle's blobs on this node. The bundle's parked tickets are queued."""
        self._coming.discard(bundle)
        self._known.add(bundle)
        for task in self._parked.pop(bundle, ()):
            self._move(task, TaskEvent.BUNDLE)

    def bundle_lost(self, bundle: bytes) -> list[Instruction]:
        """Handles a bundle that cannot be obtained, or that nobody wants any longer. The bundle's tickets fail."""
        self._coming.discard(bundle)
        for owner in self._receivers.values():
            owner.asked.discard(bundle)
        lost = self._parked.pop(bundle, [])
        for task in lost:
            self._move(task, TaskEvent.BUNDLE_LOST)
        return [Fail(task) for task in lost]

    def known(self, bundle: bytes) -> bool:
        """Returns True if the bundle's blobs are on this node."""
        return bundle in self._known

    def wanted(self, bundle: bytes) -> bool:
        """Returns True if tickets wait for the bundle's blobs."""
        return bundle in self._parked

    def waiting(self, bundle: bytes) -> list[Task]:
        """Returns each receiver's earliest unbuilt ticket of this bundle. Notes about the bundle refer to these."""
        first: dict[int, Task] = {}
        for owner in self._receivers.values():
            for task in owner.tasks.values():
                if task.bundle == bundle and task.state in (
                    TaskState.PARKED,
                    TaskState.QUEUED,
                    TaskState.BUILDING,
                ):
                    first.setdefault(owner.number, task)
        return list(first.values())

    def forget_bundle(self, bundle: bytes) -> bool:
        """Makes a bundle unknown again. Does nothing and returns False while a ticket needs it."""
        if self.waiting(bundle):
            return False
        self._known.discard(bundle)
        for owner in self._receivers.values():
            owner.asked.discard(bundle)
        return True

    def release(self, receiver: int, bundle: bytes) -> None:
        """Handles a RELEASE frame, after which the receiver sends no further tickets of this bundle."""
        owner = self._receivers.get(receiver)
        if owner is not None:
            owner.uses.pop(bundle, None)

    def used(self, bundle: bytes) -> bool:
        """Returns True if any receiver may still send tickets of this bundle."""
        return any(bundle in owner.uses for owner in self._receivers.values())

    def users(self, bundle: bytes) -> list[tuple[int, int]]:
        """Returns (receiver, stream) for each receiver that may still send tickets of this bundle."""
        return [
            (owner.number, owner.uses[bundle]) for owner in self._receivers.values() if bundle in owner.uses
        ]

    def bundle_failed(self, bundle: bytes) -> list[Instruction]:
        """Handles a bundle that cannot be loaded, or whose worker_init_fn failed. The bundle's queued tickets fail."""
        queued = [
            task for owner in self._receivers.values() for queue in owner.queues.values() for task in queue
            if task.bundle == bundle
        ]  # fmt: skip
        for task in queued:
            self._move(task, TaskEvent.FAILED)
        return [Fail(task) for task in queued]

    # Building and sending

    def next_build(self, free: Free) -> Task | None:
        """Returns the task to build now; None if nothing can be built until something changes."""
        limit = 1 if self.built_nbytes >= self._most_nbytes else self._limit
        for _ in range(len(self._turns)):
            owner = self._turns[0]
            self._turns.rotate(-1)
            task = owner.candidate(limit, free)
            if task is not None:
                self._move(task, TaskEvent.BUILD)
                return task
        return None

    def built(self, task: Task, nbytes: int) -> list[Instruction]:
        """Handles a body of `nbytes` bytes that the builder has made."""
        task.nbytes = nbytes
        self._move(task, TaskEvent.FITS if nbytes <= task.room else TaskEvent.EXCEEDS)
        if task.state is TaskState.GONE:
            return []
        return [Send(task)] if task.state is TaskState.READY else [Announce(task)]

    def failed(self, task: Task) -> list[Instruction]:
        """Handles a failure of user code while the builder was working on this task."""
        live = task.state is TaskState.BUILDING
        self._move(task, TaskEvent.FAILED)
        return [Fail(task)] if live else []

    def lost(self, task: Task) -> list[Instruction]:
        """Handles the death of the builder while it was working on this task."""
        live = task.state is TaskState.BUILDING
        self._move(task, TaskEvent.LOST)
        return [Lost(task)] if live else []

    def started(self, task: Task) -> None:
        self._move(task, TaskEvent.START)

    def sent(self, task: Task) -> None:
        """Records that the last byte of the body was sent, or that the receiver has copied the body. Ignored if the
        task is GONE."""
        if task.state is not TaskState.GONE:
            self._move(task, TaskEvent.SENT)

    # Internals

    def find(self, receiver: int, stream: int, ticket: int) -> Task | None:
        """Returns the task that a frame refers to; None if no such task exists, or no longer exists."""
        owner = self._receivers.get(receiver)
        return None if owner is None else owner.tasks.get((stream, ticket))

    def _widen(self, task: Task, room: int) -> list[Instruction]:
        task.room = max(task.room, room)
        if task.state is TaskState.HELD and task.nbytes <= task.room:
            self._move(task, TaskEvent.GRANT)
            return [Send(task)]
        return []

    def _cancel(self, task: Task) -> list[Instruction]:
        was = task.state
        self._move(task, TaskEvent.CANCEL)
        return [Withdraw(task)] if was is TaskState.READY else []

    def _move(self, task: Task, event: TaskEvent) -> None:
        """Changes the task's state, and updates the collections and counts that contain the task."""
        self._history.append((task.serial, event))
        state = TRANSITIONS.get((task.state, event))
        if state is None:
            raise IllegalTransition(task, event, self._history)
        if state is task.state:
            return
        owner = self._receivers.get(task.receiver)
        was, task.state = task.state, state
        if was in (TaskState.BUILDING, TaskState.DISCARDED) and state is not TaskState.DISCARDED:
            self._building -= 1
        self.built_nbytes += task.nbytes * ((state in BUILT) - (was in BUILT))
        if owner is not None:
            self._leave(owner, task, was)
            self._enter(owner, task)
        if state is TaskState.GONE and task.body is not None:
            self.freed.append(task.body)
            task.body = None

    def _leave(self, owner: _Receiver, task: Task, was: TaskState) -> None:
        if was is TaskState.QUEUED:
            owner.dequeue(task, turn=task.state is TaskState.BUILDING)
            self._queued -= 1
        elif was is TaskState.PARKED and task.bundle in self._parked:
            self._parked[task.bundle].remove(task)
            if not any(j.receiver == owner.number for j in self._parked[task.bundle]):
                owner.asked.discard(task.bundle)  # the request may be unanswered: the next ticket repeats it
            if not self._parked[task.bundle]:
                del self._parked[task.bundle]
        elif was is TaskState.HELD:
            owner.held.remove(task)
        elif was in (TaskState.READY, TaskState.SENDING) and task.state is TaskState.GONE:
            owner.unsent.discard(task)

    def _enter(self, owner: _Receiver, task: Task) -> None:
        if task.state is TaskState.QUEUED:
            owner.enqueue(task)
            self._queued += 1
        elif task.state is TaskState.BUILDING:
            self._building += 1
        elif task.state is TaskState.HELD:
            owner.held.append(task)
        elif task.state is TaskState.READY:
            owner.unsent.add(task)
        elif owner.tasks.get((task.stream, task.ticket)) is task:
            del owner.tasks[task.stream, task.ticket]  # frames no longer refer to it
