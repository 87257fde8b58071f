"""The feeders that should exist, and the decisions about each one. Pure: no provider, no sockets, no clock.

Each wanted feeder is a member of the set, under its number. Events change the states of members as listed in
TRANSITIONS. `step` returns the actions that are due.

    PLACING   requested from the provider, has not reported yet
    READY     has reported; receivers know it
    LOST      its connection ended; it is started again, or it reconnects
    DRAINING  no longer wanted; receivers no longer know it, and it finishes its work
    BACKOFF   was killed or could not be placed; it is placed again later
    (none)    not wanted, does not exist

A guest is a feeder of another Ray cluster, whose head was lost. It is not a member. Receivers know it until the member
with its number is READY.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from dataloaderjob.core.processes import Backoff
from dataloaderjob.core.supervision import LASTING, Cause, index_of, name_of
from dataloaderjob.core.texts import clean

BACKOFF = Backoff(1.0, 30.0)
MAX_WHY = 600
TROUBLE_S = 60.0
"""Seconds for which a problem with a feeder is reported after its last occurrence, because a feeder that is killed
repeatedly serves in between."""
DRAIN_GRACE_S = 0.5
"""Minimum time in DRAINING, in seconds. Even an idle feeder may still get a ticket from a receiver that has not read
the new list yet."""


class FeederState(Enum):
    PLACING = auto()
    READY = auto()
    LOST = auto()
    DRAINING = auto()
    BACKOFF = auto()
    NONE = auto()


class FeederEvent(Enum):
    REPORT = auto()
    LEAVE = auto()
    """The feeder's connection ended."""
    FAIL = auto()
    """The provider refused to place the feeder, or gave up on it."""
    REPLACE = auto()
    """A receiver reports that the feeder hangs."""
    LATE = auto()
    """The state's deadline has passed."""
    UNWANT = auto()
    WANT = auto()


TRANSITIONS: dict[tuple[FeederState, FeederEvent], FeederState] = {
    (FeederState.PLACING, FeederEvent.REPORT): FeederState.READY,
    (FeederState.PLACING, FeederEvent.FAIL): FeederState.BACKOFF,
    (FeederState.PLACING, FeederEvent.LATE): FeederState.BACKOFF,
    (FeederState.PLACING, FeederEvent.UNWANT): FeederState.NONE,
    (FeederState.READY, FeederEvent.REPORT): FeederState.READY,
    (FeederState.READY, FeederEvent.LEAVE): FeederState.LOST,
    (FeederState.READY, FeederEvent.REPLACE): FeederState.BACKOFF,
    (FeederState.READY, FeederEvent.UNWANT): FeederState.DRAINING,
    (FeederState.LOST, FeederEvent.REPORT): FeederState.READY,
    (FeederState.LOST, FeederEvent.FAIL): FeederState.BACKOFF,
    (FeederState.LOST, FeederEvent.REPLACE): FeederState.BACKOFF,
    (FeederState.LOST, FeederEvent.LATE): FeederState.BACKOFF,
    (FeederState.LOST, FeederEvent.UNWANT): FeederState.NONE,
    (FeederState.DRAINING, FeederEvent.REPORT): FeederState.DRAINING,
    (FeederState.DRAINING, FeederEvent.LATE): FeederState.NONE,
    (FeederState.DRAINING, FeederEvent.WANT): FeederState.READY,
    (FeederState.BACKOFF, FeederEvent.LATE): FeederState.PLACING,
    (FeederState.BACKOFF, FeederEvent.UNWANT): FeederState.NONE,
}
"""A pair of state and event that is not listed has no effect, because the event arrived late."""


class Endpoint(NamedTuple):
    """A feeder process, as described by its own report."""

    name: str
    instance: str
    host: str
    port: int
    pid: int = 0
    node: str = ""
    session: str = ""
    link: str = ""
    """The key for connections to the feeder, wrapped for sidecars (`core.keys`)."""


class Trouble(NamedTuple):
    """A recent problem with a feeder. The feeder may serve again by now."""

    cause: Cause
    why: str
    until: float


@dataclass(slots=True)
class Member:
    """One feeder of the job."""

    index: int
    state: FeederState
    since: float
    deadline: float
    failures: int = 0
    """Number of consecutive placements that yielded no feeder."""
    why: str = ""
    cause: Cause | None = None
    """The cause that `why` describes."""
    host: str = ""
    """Address of the node that should run the feeder, for messages."""
    endpoint: Endpoint | None = None
    trouble: Trouble | None = None

    @property
    def name(self) -> str:
        return name_of(self.index)

    @property
    def told(self) -> tuple[Cause | None, str]:
        """The cause and the text to report: those of the member's trouble if they explain more, otherwise the member's
        own."""
        if self.trouble is not None and self.cause in _EXPLAINED:
            return self.trouble.cause, self.trouble.why
        return self.cause, self.why


@dataclass(frozen=True, slots=True)
class FeederPlace:
    index: int


@dataclass(frozen=True, slots=True)
class Kill:
    index: int


@dataclass(frozen=True, slots=True)
class Drain:
    endpoint: Endpoint


Instruction = FeederPlace | Kill | Drain
_EXPLAINED = frozenset({None, Cause.STARTS, Cause.FAILS, Cause.LOST, Cause.OUT_OF_MEMORY})
"""Causes that explain less than a member's trouble."""


class FeederSet:
    """The set of all members. `version` increases with each change that receivers should know about."""

    def __init__(self, desired: int, *, ready_timeout_s: float, drain_timeout_s: float) -> None:
        self.desired = desired
        self.members: dict[int, Member] = {}
        self.version = 0
        self.session: str | None = None
        """Session of the Ray cluster in use; None while unknown. While it is unknown, any feeder that reports a session
        is a guest."""
        self._guests: dict[str, Endpoint] = {}
        """Guests by instance."""
        self._strays: set[int] = set()
        """Numbers of feeders that reported but are not wanted. They must be killed."""
        self._ready_timeout_s = ready_timeout_s
        self._drain_timeout_s = drain_timeout_s

    def listed(self) -> list[Endpoint]:
        """Returns the feeders that receivers should know, in the order of their numbers."""
        placed = {
            index: member.endpoint
            for index, member in self.members.items()
            if member.state is FeederState.READY and member.endpoint is not None
        }
        for guest in self._guests.values():
            index = index_of(guest.name)
            if index is not None and index < self.desired:
                placed.setdefault(index, guest)
        return [placed[index] for index in sorted(placed)]

    def notes(self) -> list[str]:
        """Returns the reasons why feeders are not ready, one line each."""
        return [
            f"{s.name}: {s.told[1]}"
            for _, s in sorted(self.members.items())
            if s.told[1] and s.state is not FeederState.DRAINING
        ]

    def out_of_memory(self) -> list[str]:
        """Returns the names of feeders whose processes were recently killed for lack of memory."""
        return [s.name for _, s in sorted(self.members.items()) if s.told[0] is Cause.OUT_OF_MEMORY]

    @property
    def next_deadline(self) -> float:
        """The time at which `step` next has something to do, if no event comes first."""
        return min((_next_deadline(member) for member in self.members.values()), default=float("inf"))

    # Events

    def opened(self, session: str, now: float) -> None:
        """Records the session of the provider that has just connected. Feeders of this session that reported earlier
        are no longer guests."""
        self.session = session
        for endpoint in [e for e in self._guests.values() if e.session == session]:
            del self._guests[endpoint.instance]
            self.report(endpoint, now)

    def scale(self, desired: int) -> None:
        """Sets the number of wanted feeders. `step` then returns the actions that this number requires."""
        if desired != self.desired:
            self.desired = desired
            self.version += 1

    def adopt(self, index: int, now: float) -> None:
        """Makes an existing feeder a member. The feeder has the usual time to report."""
        if index not in self.members:
            self.members[index] = Member(index, FeederState.PLACING, now, now + self._ready_timeout_s)

    def report(self, endpoint: Endpoint, now: float) -> bool:
        """Handles a feeder's report. Returns True if the feeder is a member or a guest; any other feeder must end.

        A wanted feeder that is not a member yet was placed by an earlier supervisor, and is adopted. A feeder that
        reports another feeder's instance is refused, because receivers tell processes apart by instance.
        """
        if self._is_of_another(endpoint):
            return False
        if endpoint.session and endpoint.session != self.session:
            self._guests[endpoint.instance] = endpoint
            self.version += 1
            return True
        index = index_of(endpoint.name)
        if index is not None and index < self.desired:
            self.adopt(index, now)
        member = None if index is None else self.members.get(index)
        if member is None or (member.state, FeederEvent.REPORT) not in TRANSITIONS:
            if member is None and index is not None:
                self._strays.add(index)
            return False
        member.endpoint = endpoint
        member.failures = 0
        self._move(member, FeederEvent.REPORT, now)
        return True

    def leave(self, name: str, instance: str, now: float) -> None:
        """Handles the end of a feeder process's connection."""
        self._dismiss(instance)
        member = self._member(name, instance)
        if member is None:
            return
        if member.state is FeederState.DRAINING:
            member.deadline = now
        why = "its connection ended; it is being restarted"
        self._move(member, FeederEvent.LEAVE, now, why=why, cause=Cause.LOST)

    def drained(self, name: str, instance: str, now: float) -> None:
        member = self._member(name, instance)
        if member is not None and member.state is FeederState.DRAINING:
            member.deadline = min(member.deadline, max(now, member.since + DRAIN_GRACE_S))

    def replace(self, name: str, instance: str, why: str, now: float) -> list[Instruction]:
        """Handles a receiver's report that a feeder process hangs. Returns the instruction to kill the process, which
        is later replaced; empty if the report is outdated."""
        why = clean(why, MAX_WHY)
        self._dismiss(instance)
        member = self._member(name, instance)
        if member is None or (member.state, FeederEvent.REPLACE) not in TRANSITIONS:
            return []
        self._move(member, FeederEvent.REPLACE, now, why=f"replaced: {why}", cause=Cause.HANGS)
        return [Kill(member.index)]

    def failed(self, index: int, why: str, now: float, cause: Cause = Cause.REFUSED) -> None:
        """Records that the provider refused to place a feeder, or gave up on it."""
        member = self.members.get(index)
        if member is not None:
            self._move(member, FeederEvent.FAIL, now, why=clean(why, MAX_WHY), cause=cause)

    def explain(self, index: int, why: str, cause: Cause = Cause.STARTS) -> None:
        """Records why a member is not ready yet. STARTS does not replace the cause of an earlier failure."""
        member, why = self.members.get(index), clean(why, MAX_WHY)
        if member is None or member.why == why or member.state not in (FeederState.PLACING, FeederState.LOST):
            return
        if cause is Cause.STARTS and (member.state is FeederState.LOST or member.cause in LASTING):
            return
        member.why, member.cause = why, cause
        self.version += 1

    def trouble(self, index: int, cause: Cause, why: str, now: float) -> None:
        """Records a problem with a member. While the problem recurs, the first text is kept, because the text may name
        a different sample each time."""
        member = self.members.get(index)
        if member is None:
            return
        known = member.trouble
        if known is not None and known.cause is cause:
            member.trouble = known._replace(until=now + TROUBLE_S)
            return
        member.trouble = Trouble(cause, clean(why, MAX_WHY), now + TROUBLE_S)
        self.version += 1

    def step(self, now: float) -> list[Instruction]:
        """Returns the actions that are due now."""
        instructions: list[Instruction] = [Kill(i) for i in self._strays if i not in self.members]
        self._strays.clear()
        for index in range(self.desired):
            member = self.members.get(index)
            if member is None:
                self.members[index] = Member(index, FeederState.PLACING, now, now + self._ready_timeout_s)
                instructions.append(FeederPlace(index))
            elif member.state is FeederState.DRAINING:
                self._move(member, FeederEvent.WANT, now)
        for index in [i for i in self.members if i >= self.desired]:
            instructions += self._unwant(self.members[index], now)
        for member in list(self.members.values()):
            if member.trouble is not None and now >= member.trouble.until:
                member.trouble = None
                self.version += 1
            if now >= member.deadline:
                instructions += self._late(member, now)
        return instructions

    # Helpers

    def _is_of_another(self, endpoint: Endpoint) -> bool:
        """Returns True if a feeder with another name has this endpoint's instance."""
        known = [member.endpoint for member in self.members.values() if member.endpoint is not None]
        return any(
            other.instance == endpoint.instance and other.name != endpoint.name
            for other in (*known, *self._guests.values())
        )

    def _dismiss(self, instance: str) -> None:
        if self._guests.pop(instance, None) is not None:
            self.version += 1

    def _unwant(self, member: Member, now: float) -> list[Instruction]:
        was = member.state
        self._move(member, FeederEvent.UNWANT, now)
        if (
            member.state is FeederState.DRAINING
            and was is not FeederState.DRAINING
            and member.endpoint is not None
        ):
            return [Drain(member.endpoint)]
        return [Kill(member.index)] if member.state is FeederState.NONE else []

    def _late(self, member: Member, now: float) -> list[Instruction]:
        if (member.state, FeederEvent.LATE) not in TRANSITIONS:
            return []
        why, cause = member.why, member.cause
        if member.state in (FeederState.PLACING, FeederState.LOST) and cause not in LASTING:
            cause = cause or Cause.STARTS
            why = f"had not reported {now - member.since:.0f} s after it was placed; restarting it" + (
                f" ({why})" if why else ""
            )
        self._move(member, FeederEvent.LATE, now, why=why, cause=cause)
        return [FeederPlace(member.index)] if member.state is FeederState.PLACING else [Kill(member.index)]

    def _member(self, name: str, instance: str) -> Member | None:
        index = index_of(name)
        member = None if index is None else self.members.get(index)
        if member is None or member.endpoint is None or member.endpoint.instance != instance:
            return None
        return member

    def _move(
        self, member: Member, event: FeederEvent, now: float, *, why: str = "", cause: Cause | None = None
    ) -> None:
        state = TRANSITIONS.get((member.state, event))
        if state is None:
            return
        if state is member.state and event is not FeederEvent.REPORT:
            return
        member.state, member.why, member.cause = state, why, cause
        self.version += 1
        if state is FeederState.DRAINING and event is FeederEvent.REPORT:
            return
        member.since = now
        if state is FeederState.NONE:
            del self.members[member.index]
        elif state is FeederState.READY:
            member.deadline = float("inf")
        elif state is FeederState.DRAINING:
            member.deadline = now + self._drain_timeout_s
        elif state is FeederState.BACKOFF:
            member.endpoint = None
            member.failures += 1
            member.deadline = now + BACKOFF.wait_s(member.failures)
        else:
            member.deadline = now + self._ready_timeout_s


def _next_deadline(member: Member) -> float:
    return member.deadline if member.trouble is None else min(member.deadline, member.trouble.until)
