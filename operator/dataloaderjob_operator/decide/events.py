"""The Kubernetes events of a job, derived from a status and its replacement. Pure.

Events are sent after the status is written. If the operator dies in between, the event is lost. No event is created
twice, because an event's name is derived from its content.
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
from dataloaderjob.core.texts import clean
from dataloaderjob_operator.decide.autoscale import SCALED
from dataloaderjob_operator.decide.conditions import FAULTS
from dataloaderjob_operator.decide.job_parts import STARTS
from dataloaderjob_operator.decide.observed import show_time
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.names import MANAGER

MAX_MESSAGE_NBYTES = 1024
"""The API's limit for the message of an event, in bytes."""
BURST = 20
"""Number of events with reasons in REPEATED that a job may send in one burst."""
REFILL_S = 120.0
"""Seconds until a job that has used up its burst may send another event with a reason in REPEATED."""


class Reason(StrEnum):
    """The reasons of all events. Tools may filter by them."""

    STARTED = "Started"
    """The operator creates the job's children."""
    NOT_READY = "NotReady"
    """The job does not serve. One such event is sent for each cause."""
    SERVING = "Serving"
    """The head, the sidecars and the feeders serve."""
    DEGRADED = "Degraded"
    """A part of a running job no longer serves."""
    RECOVERED = "Recovered"
    """All parts of the job serve again."""
    RESTARTED = "Restarted"
    """A trainer failed; all trainers are recreated."""
    SUSPENDED = "Suspended"
    """The job is suspended, and its last pod is gone."""
    RESUMED = "Resumed"
    """The job is no longer suspended."""
    COMPLETED = "Completed"
    """All trainers ended with exit code 0."""
    FAILED = "Failed"
    """The job ended without success, for example because a trainer failed or a deadline passed."""
    FEEDERS_MISSING = "FeedersMissing"
    """Fewer feeders serve than the spec requests. A running job continues with these feeders."""
    OUT_OF_MEMORY = "OutOfMemory"
    """Feeders are killed because they run out of memory. A running job continues, but may be slower."""
    ROLLOUT_STUCK = "RolloutStuck"
    """New feeders do not start. A running job continues with the old feeders."""
    IDLE = "Idle"
    """No pod has been attached for a long time, so the operator stops the feeders."""
    ATTACHED = "Attached"
    """A pod of another controller has the sidecar and has attached."""
    INJECTED = "Injected"
    """Pods of a controller have the sidecar. The event is about the controller, not about the job."""
    NOT_ATTACHED = "NotAttached"
    """Pods have the label, but the job that it names does not exist or has its own trainers. The event is about the
    pods' controller, or about the pod if it has no controller."""
    POD_REFUSED = "PodRefused"
    """A pod with the job's label was refused when its controller created it."""
    DETACHED = "Detached"
    """An attached pod has ended or is being deleted."""
    NOT_FOLLOWED = "FollowedNotRead"
    """The operator cannot read the object that the job follows."""
    SCALED = "Scaled"
    """The operator changed the number of feeder pods (`autoscaling.mode: Auto`)."""
    MANAGED_ELSEWHERE = "ManagedElsewhere"
    """`spec.managedBy` names another controller, so the operator leaves the job alone."""
    UNKNOWN_FIELD = "UnknownField"
    """An unknown field of a template resembles a known one."""


WARNINGS = frozenset(
    {
        Reason.NOT_READY,
        Reason.DEGRADED,
        Reason.RESTARTED,
        Reason.FAILED,
        Reason.FEEDERS_MISSING,
        Reason.OUT_OF_MEMORY,
        Reason.ROLLOUT_STUCK,
        Reason.NOT_FOLLOWED,
        Reason.NOT_ATTACHED,
        Reason.POD_REFUSED,
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
        Reason.IDLE,
        Reason.ATTACHED,
        Reason.INJECTED,
        Reason.NOT_ATTACHED,
        Reason.POD_REFUSED,
        Reason.DETACHED,
        Reason.SCALED,
    }
)
"""Reasons that may recur, as parts of a job fail and recover, or pods come and go."""
MAX_NAME = 230
"""Maximum number of characters of an object's name within an event's name. An event's name may have at most 253."""
HELD = frozenset({Phase.SUSPENDING, Phase.SUSPENDED})
Status = DataLoaderJobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """The controller of an attached pod, as named by the pod."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class JobEvent:
    """An event, without the job to which it belongs."""

    reason: Reason
    message: str
    once: str
    """A key for the occurrence. Two events of a job with the same reason and the same key are the same event."""
    about: Controller | None = None
    """The object that the event is about; None for the job."""

    @property
    def type(self) -> str:
        return "Warning" if self.reason in WARNINGS else "Normal"


@dataclass(frozen=True, slots=True)
class _Row:
    """One kind of event: the reason, the trigger, the message, and the key of an occurrence."""

    reason: Reason
    happened: Callable[[Status, Status], bool]
    text: Callable[[Status], str]
    once: Callable[[Status], str]


def events_of(before: Status, after: Status) -> tuple[JobEvent, ...]:
    """Returns the events that a change of status causes; none if nothing changed."""
    return tuple(
        JobEvent(row.reason, cut(row.text(after), MAX_MESSAGE_NBYTES), row.once(after))
        for row in _ROWS
        if row.happened(before, after)
    )


def cut(text: str, nbytes: int) -> str:
    """Returns clean text of at most `nbytes` bytes of UTF-8, cut at the end of a character."""
    return clean(text, nbytes + 1).encode(errors="replace")[:nbytes].decode(errors="ignore")


def unknown_fields(doubts: Sequence[str], generation: int) -> JobEvent:
    """Returns the event about unknown template fields that resemble known ones. Each spec causes at most one such
    event."""
    return JobEvent(Reason.UNKNOWN_FIELD, cut("; ".join(doubts), MAX_MESSAGE_NBYTES), str(generation))


def managed_elsewhere(manager: str) -> JobEvent:
    """Returns the event about a job that the operator leaves alone."""
    text = f"spec.managedBy is {manager}: this operator, {MANAGED_BY}, leaves the job to that controller"
    return JobEvent(Reason.MANAGED_ELSEWHERE, text, manager)


def manifest(event: JobEvent, about: Metadata, now: datetime, host: str) -> Manifest:
    """Returns the event as an object for the API server. The same event always gets the same name."""
    identity = f"{about.uid}/{event.reason.value}/{event.once}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    found = event.about or Controller(
        api_version=API_VERSION, kind=KIND, name=about.name, uid=about.uid or ""
    )
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{found.name[:MAX_NAME].rstrip('-.')}.{digest}", "namespace": about.namespace,
        },
        "involvedObject": {
            "apiVersion": found.api_version, "kind": found.kind, "name": found.name,
            "namespace": about.namespace, "uid": found.uid,
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
    """The limit on each job's events with reasons in REPEATED. Callers pass the time, in seconds of any clock."""

    _left: dict[str, tuple[float, float]] = field(default_factory=dict)

    def take(self, uid: str, reason: Reason, now: float) -> bool:
        """Counts an event of the job with this uid. Returns True if the event may be sent."""
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
    """Returns a function that formats the reason and message of a condition."""

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


def _recovered(before: Status, after: Status) -> bool:
    return before.phase is Phase.DEGRADED and after.phase in {Phase.RUNNING, Phase.SERVING}


def _idles(before: Status, after: Status) -> bool:
    return after.phase is Phase.IDLE and before.phase is not Phase.IDLE


def _degraded(before: Status, after: Status) -> bool:
    ran = before.phase in {Phase.RUNNING, Phase.SERVING} and after.phase is Phase.DEGRADED
    return ran and not _restarted(before, after)


def _serves(before: Status, after: Status) -> bool:
    return (
        _became(ConditionType.READY)(before, after) and before.phase is not Phase.DEGRADED and not _end(after)
    )


def _new_cause(before: Status, after: Status) -> bool:
    """Returns True if a cause is new: its reason differs from the previous one, and no `Degraded` or `Restarted` event
    reports it."""
    old, new = before.condition(ConditionType.READY), after.condition(ConditionType.READY)
    if new is None or new.status == "True" or new.reason in STARTS:
        return False
    if _degraded(before, after) or _restarted(before, after):
        return False
    if (
        after.phase not in {Phase.STARTING, Phase.WAITING, Phase.QUEUED, Phase.DEGRADED}
        and new.reason not in FAULTS
    ):
        return False
    return old is None or old.reason != new.reason


def _cause(status: Status) -> str:
    """Returns a key for the cause of a status. A cause is reported only once per spec, start and attempt."""
    ready = status.condition(ConditionType.READY)
    return f"{ready.reason if ready else ''}/{status.observed_generation}/{_start(status)}/{status.trainers.restarts}"


def _scaled(before: Status, after: Status) -> bool:
    """Returns True if the condition AutoscalingActive reports a new change in the number of feeders."""
    old, new = (status.condition(ConditionType.AUTOSCALING_ACTIVE) for status in (before, after))
    return new is not None and new.message.startswith(SCALED) and (old is None or old.message != new.message)


def _change(status: Status) -> str:
    return f"{status.observed_generation}/{_message(ConditionType.AUTOSCALING_ACTIVE)(status)}"


def _moves_because(reason: Reason) -> Callable[[Status, Status], bool]:
    """Returns a function that checks whether the condition Progressing has just got this reason."""

    def begins(before: Status, after: Status) -> bool:
        old, new = (status.condition(ConditionType.PROGRESSING) for status in (before, after))
        return new is not None and new.reason == reason and (old is None or old.reason != reason)

    return begins


_ROWS = (
    _Row(Reason.STARTED, _started, lambda _: "the operator creates the job's children", _start),
    _Row(Reason.RESUMED, _resumed, lambda _: "the operator recreates the job's pods", _start),
    _Row(
        Reason.RESTARTED,
        _restarted,
        _message(ConditionType.PROGRESSING, "a trainer failed"),
        lambda after: str(after.trainers.restarts),
    ),
    *(
        _Row(reason, _moves_because(reason), _message(ConditionType.PROGRESSING), _cause)
        for reason in (
            Reason.FEEDERS_MISSING,
            Reason.OUT_OF_MEMORY,
            Reason.ROLLOUT_STUCK,
            Reason.NOT_FOLLOWED,
        )
    ),
    _Row(Reason.NOT_READY, _new_cause, _why(ConditionType.READY), _cause),
    _Row(Reason.SERVING, _serves, _message(ConditionType.READY), _since(ConditionType.READY)),
    _Row(
        Reason.DEGRADED, _degraded, _why(ConditionType.READY), _since(ConditionType.READY),
    ),
    _Row(
        Reason.RECOVERED, _recovered, _message(ConditionType.READY),
        _since(ConditionType.READY),
    ),
    _Row(Reason.IDLE, _idles, _message(ConditionType.READY), lambda after: after.trainers.idle_since or ""),
    _Row(
        Reason.SUSPENDED, _became(ConditionType.SUSPENDED), lambda _: "the job has no pods left",
        _since(ConditionType.SUSPENDED),
    ),
    _Row(Reason.SCALED, _scaled, _message(ConditionType.AUTOSCALING_ACTIVE), _change),
    _Row(Reason.COMPLETED, _became(ConditionType.COMPLETE), _message(ConditionType.COMPLETE), _end),
    _Row(Reason.FAILED, _became(ConditionType.FAILED), _why(ConditionType.FAILED), _end),
)  # fmt: skip
