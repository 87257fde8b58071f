"""Kubernetes events of a job, as `kubectl describe` shows them, from one status and the one that replaces it. Pure.

Events follow the write of a status: an operator that dies in between loses that event, and none is there twice, for
its name follows from its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from dataloaderjob.api import KIND
from dataloaderjob.api.job import API_VERSION, MANAGED_BY, Metadata
from dataloaderjob.api.status import ConditionType, DataLoaderJobStatus, Phase
from dataloaderjob_operator.decide.conditions import FAULTS, STARTS
from dataloaderjob_operator.decide.observed import show_time
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import MANAGER

MAX_MESSAGE_NBYTES = 1024
"""Limit of the API for the message of an event."""
BURST = 20
"""Events of a job at once, of those that may come again and again."""
REFILL_S = 120.0
"""Seconds after which a job may have one more of them."""


class Reason(StrEnum):
    """Reasons of all events that there are, for whoever filters by them."""

    STARTED = "Started"
    """The operator makes the job's children."""
    NOT_READY = "NotReady"
    """A cause for which it does not serve, once for each cause."""
    SERVING = "Serving"
    """Head, sidecars and feeders serve."""
    DEGRADED = "Degraded"
    """A part of a running job no longer serves."""
    RECOVERED = "Recovered"
    """The job's parts all serve again."""
    RESTARTED = "Restarted"
    """A trainer failed; all are made anew."""
    SUSPENDED = "Suspended"
    """No pod is left."""
    RESUMED = "Resumed"
    """It is held no longer."""
    COMPLETED = "Completed"
    """The trainers all ended with exit code 0."""
    FAILED = "Failed"
    """It ended otherwise."""
    FEEDERS_MISSING = "FeedersMissing"
    """Fewer feeders serve than are asked for, and a job that runs goes on with those."""
    OUT_OF_MEMORY = "OutOfMemory"
    """Feeders are killed for want of memory, and a job that runs goes on with what they manage."""
    ROLLOUT_STUCK = "RolloutStuck"
    """New feeders do not start, and a job that runs goes on with those of before."""
    MANAGED_ELSEWHERE = "ManagedElsewhere"
    """`spec.managedBy` names another controller: the operator does nothing about the job."""
    UNKNOWN_FIELD = "UnknownField"
    """A field of a template resembles one that there is."""


WARNINGS = frozenset(
    {
        Reason.NOT_READY,
        Reason.DEGRADED,
        Reason.RESTARTED,
        Reason.FAILED,
        Reason.FEEDERS_MISSING,
        Reason.OUT_OF_MEMORY,
        Reason.ROLLOUT_STUCK,
        Reason.UNKNOWN_FIELD,
    }
)
REPEATED = frozenset(
    {
        Reason.NOT_READY,
        Reason.SERVING,
        Reason.DEGRADED,
        Reason.RECOVERED,
        Reason.FEEDERS_MISSING,
        Reason.OUT_OF_MEMORY,
        Reason.ROLLOUT_STUCK,
    }
)
"""Reasons that a job whose parts come and go has again and again."""
HELD = frozenset({Phase.SUSPENDING, Phase.SUSPENDED})
Status = DataLoaderJobStatus


@dataclass(frozen=True, slots=True)
class Event:
    """An event, without the job that it is about."""

    reason: Reason
    message: str
    once: str
    """Two events of one reason with the same value here are one."""

    @property
    def type(self) -> str:
        return "Warning" if self.reason in WARNINGS else "Normal"


@dataclass(frozen=True, slots=True)
class _Row:
    """A reason, when it happens, its message, and the key for which it happens once."""

    reason: Reason
    happened: Callable[[Status, Status], bool]
    text: Callable[[Status], str]
    once: Callable[[Status], str]


def events_of(before: Status, after: Status) -> tuple[Event, ...]:
    """Finds the events of a change of status; none if nothing changed."""
    return tuple(
        Event(row.reason, cut(row.text(after), MAX_MESSAGE_NBYTES), row.once(after))
        for row in _ROWS
        if row.happened(before, after)
    )


def cut(text: str, nbytes: int) -> str:
    """Cuts a text to so many bytes of UTF-8, and whole characters."""
    return text.encode(errors="replace")[:nbytes].decode(errors="ignore")


def unknown_fields(doubts: Sequence[str], generation: int) -> Event:
    """The event for fields that resemble misspelt ones, once for a spec."""
    return Event(Reason.UNKNOWN_FIELD, cut("; ".join(doubts), MAX_MESSAGE_NBYTES), str(generation))


def managed_elsewhere(manager: str) -> Event:
    """The event for a job that the operator leaves alone."""
    text = f"spec.managedBy is {manager}: the operator leaves the job to it; its own name is {MANAGED_BY}"
    return Event(Reason.MANAGED_ELSEWHERE, text, manager)


def manifest(event: Event, about: Metadata, now: datetime, host: str) -> Manifest:
    """Makes the object for the API server. The same event has the same name each time."""
    identity = f"{about.uid}/{event.reason.value}/{event.once}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{about.name}.{digest}", "namespace": about.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION, "kind": KIND, "name": about.name, "namespace": about.namespace,
            "uid": about.uid,
        },
        "type": event.type,
        "reason": event.reason.value,
        "message": event.message,
        "count": 1,
        "firstTimestamp": show_time(now),
        "lastTimestamp": show_time(now),
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "reportingInstance": host,
    }  # fmt: skip


@dataclass(slots=True)
class Budget:
    """Limits the events of REPEATED for each job. Time comes in, in seconds of any clock."""

    _left: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, uid: str, reason: Reason, now: float) -> bool:
        """Checks whether this event may be sent, and counts it."""
        if reason not in REPEATED:
            return True
        left, since = self._left.get(uid, (float(BURST), now))
        left = min(float(BURST), left + (now - since) / REFILL_S)
        self._left[uid] = (left - 1 if left >= 1 else left, now)
        return left >= 1

    def forget(self, uid: str) -> None:
        self._left.pop(uid, None)


def _became(kind: ConditionType) -> Callable[[Status, Status], bool]:
    return lambda before, after: after.holds(kind) and not before.holds(kind)


def _message(kind: ConditionType, default: str = "") -> Callable[[Status], str]:
    def text(status: Status) -> str:
        found = status.condition(kind)
        return (found.message if found else "") or default

    return text


def _why(kind: ConditionType) -> Callable[[Status], str]:
    """Reason and message of a condition, as text."""

    def text(status: Status) -> str:
        found = status.condition(kind)
        return "" if found is None else f"{found.reason}: {found.message}" if found.message else found.reason

    return text


def _since(kind: ConditionType) -> Callable[[Status], str]:
    def once(status: Status) -> str:
        found = status.condition(kind)
        return "" if found is None else found.last_transition_time

    return once


def _start(status: Status) -> str:
    return status.start_time or ""


def _end(status: Status) -> str:
    return status.completion_time or ""


def _started(before: Status, after: Status) -> bool:
    return before.start_time is None and after.start_time is not None and before.phase not in HELD


def _resumed(before: Status, after: Status) -> bool:
    return before.phase in HELD and after.phase not in HELD and after.completion_time is None


def _restarted(before: Status, after: Status) -> bool:
    return after.trainers.restarts > before.trainers.restarts


def _phases(one: Phase, other: Phase) -> Callable[[Status, Status], bool]:
    return lambda before, after: before.phase is one and after.phase is other


def _degraded(before: Status, after: Status) -> bool:
    return _phases(Phase.RUNNING, Phase.DEGRADED)(before, after) and not _restarted(before, after)


def _serves(before: Status, after: Status) -> bool:
    return (
        _became(ConditionType.READY)(before, after) and before.phase is not Phase.DEGRADED and not _end(after)
    )


def _new_cause(before: Status, after: Status) -> bool:
    """A cause is new if its reason is another than before, and no event `Degraded` or `Restarted` has it."""
    old, new = before.condition(ConditionType.READY), after.condition(ConditionType.READY)
    if new is None or new.status == "True" or new.reason in STARTS:
        return False
    if _degraded(before, after) or _restarted(before, after):
        return False
    if after.phase not in {Phase.STARTING, Phase.QUEUED, Phase.DEGRADED} and new.reason not in FAULTS:
        return False
    return old is None or old.reason != new.reason


def _cause(status: Status) -> str:
    """The same cause is reported once for a spec, a start and an attempt, however often it comes and goes."""
    ready = status.condition(ConditionType.READY)
    return f"{ready.reason if ready else ''}/{status.observed_generation}/{_start(status)}/{status.trainers.restarts}"


def _moves_because(reason: Reason) -> Callable[[Status, Status], bool]:
    """Progressing has this reason, and had another."""

    def begins(before: Status, after: Status) -> bool:
        old, new = (status.condition(ConditionType.PROGRESSING) for status in (before, after))
        return new is not None and new.reason == reason and (old is None or old.reason != reason)

    return begins


_ROWS = (
    _Row(Reason.STARTED, _started, lambda _: "the operator makes the job's children", _start),
    _Row(Reason.RESUMED, _resumed, lambda _: "the operator makes the job's pods anew", _start),
    _Row(
        Reason.RESTARTED,
        _restarted,
        _message(ConditionType.PROGRESSING, "a trainer failed"),
        lambda after: str(after.trainers.restarts),
    ),
    *(
        _Row(reason, _moves_because(reason), _message(ConditionType.PROGRESSING), _cause)
        for reason in (Reason.FEEDERS_MISSING, Reason.OUT_OF_MEMORY, Reason.ROLLOUT_STUCK)
    ),
    _Row(Reason.NOT_READY, _new_cause, _why(ConditionType.READY), _cause),
    _Row(Reason.SERVING, _serves, _message(ConditionType.READY), _since(ConditionType.READY)),
    _Row(
        Reason.DEGRADED, _degraded, _why(ConditionType.READY), _since(ConditionType.READY),
    ),
    _Row(
        Reason.RECOVERED, _phases(Phase.DEGRADED, Phase.RUNNING), _message(ConditionType.READY),
        _since(ConditionType.READY),
    ),
    _Row(
        Reason.SUSPENDED, _became(ConditionType.SUSPENDED), lambda _: "the job has no pod left",
        _since(ConditionType.SUSPENDED),
    ),
    _Row(Reason.COMPLETED, _became(ConditionType.COMPLETE), _message(ConditionType.COMPLETE), _end),
    _Row(Reason.FAILED, _became(ConditionType.FAILED), _why(ConditionType.FAILED), _end),
)  # fmt: skip
