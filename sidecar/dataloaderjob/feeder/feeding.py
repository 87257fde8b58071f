"""What a feeder does with its tickets: the protocol machine of one feeder and all its links. Pure.

Events go in (a frame came, a batch is built, a body is sent), instructions come out; payloads are never
looked at. Each bundle has a builder of its own, which makes one batch at a time: the shell says which are
free. The shell is `feeder.server`. Every ticket is a `Job` whose state changes by the table in
`feeding_states` only.

Turns go round robin over links, within a link round robin over streams, within a stream by ticket.
A link with `limit` batches HELD, or as many built and unsent, gets nothing built. One exception keeps a
receiver from waiting for ever: the ticket before all HELD ones of its stream is built nevertheless,
because the receiver may give no room to the later ones until it has this one.
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
    Job,
    Lost,
    NeedBundle,
    Send,
    State,
    Withdraw,
)

DEFAULT_LIMIT = 2
"""Built batches that a link may hold: one being sent, one ready behind it."""
_HISTORY = 64
Free = Callable[[bytes], bool]
"""Whether the builder of a bundle has nothing to do."""


class _Link:
    """Tickets of one connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.generation = 0
        self.jobs: dict[tuple[int, int], Job] = {}
        """(stream, ticket) -> the job that a frame means: any state up to READY, not DISCARDED."""
        self.queues: dict[int, list[Job]] = {}
        """stream -> QUEUED jobs by ticket; the dict's order is the order of turns."""
        self.held: list[Job] = []
        self.unsent: set[Job] = set()
        """READY and SENDING."""
        self.asked: set[bytes] = set()
        self.uses: set[bytes] = set()
        """Bundles of which tickets came, until they are released."""

    def candidate(self, limit: int, free: Free) -> Job | None:
        """The job to build next, or None."""
        if len(self.unsent) >= limit:
            return None
        for stream, queue in self.queues.items():
            job = queue[0]
            if not free(job.bundle):
                continue
            if len(self.held) < limit or all(h.ticket > job.ticket for h in self.held if h.stream == stream):
                return job
        return None

    def enqueue(self, job: Job) -> None:
        insort(self.queues.setdefault(job.stream, []), job, key=lambda j: j.ticket)

    def dequeue(self, job: Job, *, turn: bool = False) -> None:
        """With `turn`, the stream goes to the end of the line."""
        queue = self.queues[job.stream]
        queue.remove(job)
        if not queue:
            del self.queues[job.stream]
        elif turn and len(self.queues) > 1:
            self.queues[job.stream] = self.queues.pop(job.stream)


class Feeding:
    """The machine. Methods are events and return instructions, in the order in which to follow them."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._links: dict[int, _Link] = {}
        self._turns: deque[_Link] = deque()
        self._known: set[bytes] = set()
        self._coming: set[bytes] = set()
        self._parked: dict[bytes, list[Job]] = {}
        self._building = 0
        self._queued = 0
        self.freed: list[Any] = []
        """Bodies that are sent or given up; the shell takes them out."""
        self._serial = 0
        self._history: deque[tuple[int, Event]] = deque(maxlen=_HISTORY)

    @property
    def load(self) -> int:
        """Tickets queued or being built, of all links: what a receiver compares feeders by."""
        return self._queued + sum(map(len, self._parked.values())) + self._building

    @property
    def idle(self) -> bool:
        """Whether nothing is owed to anybody."""
        return not self.load and not any(k.held or k.unsent for k in self._links.values())

    # Links

    def opened(self, link: int) -> None:
        self._links[link] = made = _Link(link)
        self._turns.append(made)

    def closed(self, link: int) -> None:
        """The connection ended; safe to report twice."""
        gone = self._links.get(link)
        if gone is None:
            return
        self._cancel_all(gone)
        for job in list(gone.unsent):
            self._move(job, Event.CANCEL)
        del self._links[link]
        self._turns.remove(gone)

    # Frames

    def ticket(
        self,
        link: int,
        *,
        generation: int,
        stream: int,
        ticket: int,
        bundle: bytes,
        flags: int,
        room: int,
        payload: bytes,
    ) -> list[Instruction]:
        """A TICKET frame. The same ticket again only raises its room."""
        owner = self._links[link]
        owner.uses.add(bundle)
        if generation < owner.generation:
            return []
        made: list[Instruction] = []
        if generation > owner.generation:
            made = self._cancel_all(owner)
            owner.generation = generation
        known = owner.jobs.get((stream, ticket))
        if known is not None:
            known.flags |= flags
            return made + self._widen(known, room)
        self._serial += 1
        state = State.QUEUED if bundle in self._known else State.PARKED
        job = Job(self._serial, link, generation, stream, ticket, bundle, flags, room, payload, state)
        owner.jobs[stream, ticket] = job
        if state is State.QUEUED:
            owner.enqueue(job)
            self._queued += 1
            return made
        self._parked.setdefault(bundle, []).append(job)
        if bundle not in self._coming and bundle not in owner.asked:
            owner.asked.add(bundle)
            made.append(NeedBundle(link, job))
        return made

    def grant(self, link: int, *, generation: int, stream: int, ticket: int, room: int) -> list[Instruction]:
        """A GRANT frame. For a batch not yet built (asked again after its announcement) it is room."""
        job = self.find(link, generation, stream, ticket)
        if job is None:
            return []
        job.room = max(job.room, room)
        was = job.state
        self._move(job, Event.GRANT)
        return [Send(job)] if was is State.HELD else []

    def cancel(self, link: int, *, generation: int, stream: int, ticket: int) -> list[Instruction]:
        """A CANCEL frame: the ticket is forgotten, unless a part of its body is out."""
        job = self.find(link, generation, stream, ticket)
        return [] if job is None else self._cancel(job)

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
        for job in self._parked.pop(bundle, ()):
            self._move(job, Event.BUNDLE)

    def bundle_lost(self, bundle: bytes) -> list[Instruction]:
        """The bundle cannot be had: its tickets fail. Also ends the coming of a bundle that nobody wants."""
        self._coming.discard(bundle)
        for owner in self._links.values():
            owner.asked.discard(bundle)
        lost = self._parked.pop(bundle, [])
        for job in lost:
            self._move(job, Event.BUNDLE_LOST)
        return [Fail(job) for job in lost]

    def known(self, bundle: bytes) -> bool:
        """Whether its blobs are here."""
        return bundle in self._known

    def wanted(self, bundle: bytes) -> bool:
        """Whether tickets wait for its blobs."""
        return bundle in self._parked

    def waiting(self, bundle: bytes) -> list[Job]:
        """The earliest unbuilt ticket of this bundle on each link: whom a note about it concerns."""
        first: dict[int, Job] = {}
        for owner in self._links.values():
            for job in owner.jobs.values():
                if job.bundle == bundle and job.state in (State.PARKED, State.QUEUED, State.BUILDING):
                    first.setdefault(owner.number, job)
        return list(first.values())

    def forget_bundle(self, bundle: bytes) -> bool:
        """Makes a bundle unknown again. Returns False, and does nothing, while a ticket needs it."""
        if self.waiting(bundle):
            return False
        self._known.discard(bundle)
        for owner in self._links.values():
            owner.asked.discard(bundle)
        return True

    def release(self, link: int, bundle: bytes) -> None:
        """A RELEASE frame: that receiver sends no further ticket of this bundle."""
        owner = self._links.get(link)
        if owner is not None:
            owner.uses.discard(bundle)

    def used(self, bundle: bytes) -> bool:
        """Whether any receiver may still send tickets of this bundle."""
        return any(bundle in owner.uses for owner in self._links.values())

    def bundle_failed(self, bundle: bytes) -> list[Instruction]:
        """The bundle cannot be loaded, or its worker_init_fn failed: tickets that wait for it fail."""
        queued = [
            job for owner in self._links.values() for queue in owner.queues.values() for job in queue
            if job.bundle == bundle
        ]  # fmt: skip
        for job in queued:
            self._move(job, Event.FAILED)
        return [Fail(job) for job in queued]

    # Building and sending

    def next_build(self, free: Free) -> Job | None:
        """The job to build now, or None until something changes."""
        for _ in range(len(self._turns)):
            owner = self._turns[0]
            self._turns.rotate(-1)
            job = owner.candidate(self._limit, free)
            if job is not None:
                self._move(job, Event.BUILD)
                return job
        return None

    def built(self, job: Job, nbytes: int) -> list[Instruction]:
        """The builder has made a body of `nbytes`."""
        job.nbytes = nbytes
        self._move(job, Event.FITS if nbytes <= job.room else Event.EXCEEDS)
        if job.state is State.GONE:
            return []
        return [Send(job)] if job.state is State.READY else [Announce(job)]

    def failed(self, job: Job) -> list[Instruction]:
        """User code failed while the builder made this job."""
        told = job.state is State.BUILDING
        self._move(job, Event.FAILED)
        return [Fail(job)] if told else []

    def lost(self, job: Job) -> list[Instruction]:
        """The builder ended while it made this job."""
        told = job.state is State.BUILDING
        self._move(job, Event.LOST)
        return [Lost(job)] if told else []

    def started(self, job: Job) -> None:
        self._move(job, Event.START)

    def sent(self, job: Job) -> None:
        """The last byte of the body is out. Ignored if the link has ended."""
        if job.state is not State.GONE:
            self._move(job, Event.SENT)

    # Within

    def find(self, link: int, generation: int, stream: int, ticket: int) -> Job | None:
        """The job that a frame means; None if there is none (any more)."""
        owner = self._links.get(link)
        if owner is None or generation != owner.generation:
            return None
        return owner.jobs.get((stream, ticket))

    def _widen(self, job: Job, room: int) -> list[Instruction]:
        job.room = max(job.room, room)
        if job.state is State.HELD and job.nbytes <= job.room:
            self._move(job, Event.GRANT)
            return [Send(job)]
        return []

    def _cancel(self, job: Job) -> list[Instruction]:
        was = job.state
        self._move(job, Event.CANCEL)
        return [Withdraw(job)] if was is State.READY else []

    def _cancel_all(self, owner: _Link) -> list[Instruction]:
        return [made for job in list(owner.jobs.values()) for made in self._cancel(job)]

    def _move(self, job: Job, event: Event) -> None:
        """Changes the state, and the places where the job is counted."""
        self._history.append((job.serial, event))
        state = TRANSITIONS.get((job.state, event))
        if state is None:
            raise IllegalTransition(job, event, self._history)
        if state is job.state:
            return
        owner = self._links.get(job.link)
        was, job.state = job.state, state
        if was in (State.BUILDING, State.DISCARDED) and state is not State.DISCARDED:
            self._building -= 1
        if owner is not None:
            self._leave(owner, job, was)
            self._enter(owner, job)
        if state is State.GONE and job.body is not None:
            self.freed.append(job.body)
            job.body = None

    def _leave(self, owner: _Link, job: Job, was: State) -> None:
        if was is State.QUEUED:
            owner.dequeue(job, turn=job.state is State.BUILDING)
            self._queued -= 1
        elif was is State.PARKED and job.bundle in self._parked:
            self._parked[job.bundle].remove(job)
            if not any(j.link == owner.number for j in self._parked[job.bundle]):
                owner.asked.discard(job.bundle)  # nobody may have answered: the next ticket asks again
            if not self._parked[job.bundle]:
                del self._parked[job.bundle]
        elif was is State.HELD:
            owner.held.remove(job)
        elif was in (State.READY, State.SENDING) and job.state is State.GONE:
            owner.unsent.discard(job)

    def _enter(self, owner: _Link, job: Job) -> None:
        if job.state is State.QUEUED:
            owner.enqueue(job)
            self._queued += 1
        elif job.state is State.BUILDING:
            self._building += 1
        elif job.state is State.HELD:
            owner.held.append(job)
        elif job.state is State.READY:
            owner.unsent.add(job)
        elif owner.jobs.get((job.stream, job.ticket)) is job:
            del owner.jobs[job.stream, job.ticket]  # frames no longer mean it
