"""The conditions of a job, derived from its stage and its parts. Pure: callers pass the time. A condition keeps its
transition time while its status stays the same."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime

from dataloaderjob.api.status import Condition, ConditionType, DataLoaderJobStatus
from dataloaderjob.core.texts import clean
from dataloaderjob_operator.decide import attached, restarts
from dataloaderjob_operator.decide.health import ConditionState
from dataloaderjob_operator.decide.job_parts import STARTS, Parts, lacking_parts
from dataloaderjob_operator.decide.observed import Observed, show_time
from dataloaderjob_operator.decide.stages import (
    AT_WORK,
    ATTACHED,
    CHILDREN_START,
    ENDED,
    HELD,
    MOVING,
    Stage,
    StageResult,
)

FAULTS = frozenset({"InvalidSpec", "NotUnderstood"})
"""Condition reasons that persist until the job's spec changes."""
MAX_MESSAGE = 4096
"""Maximum number of characters of a message, as in the CRD."""
WITHHELD = "the API server refused the text of this condition: see the operator's log"
"""Replacement for a message that made the API server refuse a status."""
_NOT_IN_REASONS = re.compile("[^A-Za-z0-9]+")


_TELLING = (
    (ConditionType.FAILED, "True"),
    (ConditionType.READY, "False"),
    (ConditionType.PROGRESSING, "True"),
)
"""Condition types, each with the status that shows that a job is not in its desired state. The first match is used."""
_SAID = frozenset(stage.value for stage in Stage)
"""Condition reasons that merely repeat the phase."""


def conditions(
    observed: Observed, result: StageResult, found: Parts, short: ConditionState | None, now: datetime
) -> tuple[Condition, ...]:
    """Returns all conditions, in the order of `ConditionType`."""
    return tuple(
        made_condition(
            observed.status, kind, state, observed.generation, now, refused_texts=observed.refused_texts
        )
        for kind, state in _all(
            result,
            found,
            _hindrance(observed),
            short or _left_behind(observed, now),
            attached.cannot_follow(observed),
            attaches=observed.job.spec.trainers.attached,
        )
    )


def reason_of(conditions: Iterable[Condition]) -> str:
    """Returns the reason why a job is not in its desired state, from its conditions. Returns an empty string if the job
    is in that state, or if the reason would only repeat the phase."""
    found = {condition.type: condition for condition in conditions}
    for kind, bad in _TELLING:
        if kind in found and found[kind].status == bad:
            return "" if found[kind].reason in _SAID else found[kind].reason
    return ""


def not_ready(
    before: DataLoaderJobStatus,
    why: ConditionState,
    generation: int,
    now: datetime,
    *,
    refused_texts: frozenset[str],
) -> DataLoaderJobStatus:
    """Returns the status with one change: the reason why the job is not ready."""
    stalled = ConditionState(True, why.reason, why.message)
    made = [
        made_condition(before, kind, state, generation, now, refused_texts=refused_texts)
        for kind, state in ((ConditionType.READY, why), (ConditionType.STALLED, stalled))
    ]
    known = {condition.type: condition for condition in (*before.conditions, *made)}
    ordered = tuple(known[kind] for kind in ConditionType if kind in known)
    update = {"conditions": ordered, "reason": reason_of(ordered), "observed_generation": generation}
    return before.model_copy(update=update)


def reason_word(text: str, most: int = 128) -> str:
    """Converts text to a single word that is valid as a condition's reason."""
    return _NOT_IN_REASONS.sub("", text)[:most] or "Unknown"


def without_messages(status: DataLoaderJobStatus) -> tuple[DataLoaderJobStatus, frozenset[str]]:
    """Removes the messages from a status. Returns the status and the messages."""
    messages = frozenset(c.message for c in status.conditions) - {"", WITHHELD}
    bare = tuple(c.model_copy(update={"message": c.message and WITHHELD}) for c in status.conditions)
    return status.model_copy(update={"conditions": bare}), messages


def made_condition(
    before: DataLoaderJobStatus, kind: ConditionType, state: ConditionState, generation: int, now: datetime, *,
    refused_texts: frozenset[str],
) -> Condition:  # fmt: skip
    """Builds one condition. Its text is safe for the API server and for a terminal, whatever the source of the text."""
    old, message = before.condition(kind), clean(state.message, MAX_MESSAGE)
    return Condition(
        type=kind, status=state.status, reason=reason_word(state.reason),
        message=WITHHELD if message in refused_texts else message, observed_generation=generation,
        last_transition_time=old.last_transition_time if old and old.status == state.status else show_time(now),
    )  # fmt: skip


def _left_behind(observed: Observed, now: datetime) -> ConditionState | None:
    """Returns the condition state that reports stuck pods, for which the operator no longer waits; None if no pods are
    stuck."""
    gone = restarts.stuck(observed, now)
    return ConditionState(False, "PodsStuck", restarts.describe_stuck(gone)) if gone else None


def _hindrance(observed: Observed) -> ConditionState | None:
    """Returns the obstacle to creating children, as a condition state; None if there is none."""
    if observed.not_understood:
        return ConditionState(False, "NotUnderstood", observed.not_understood)
    return ConditionState(False, "ChildRefused", observed.refused) if observed.refused else None


def _all(
    result: StageResult,
    found: Parts,
    hindrance: ConditionState | None,
    short: ConditionState | None,
    unread: ConditionState | None,
    *,
    attaches: bool,
) -> Iterator[tuple[ConditionType, ConditionState]]:
    stage = result.stage
    if stage in ENDED or stage in HELD:
        gone = ConditionState(False, stage.value, "its pods are released")
        found = dict.fromkeys(found, gone)
    ready = _ready(result, found, attaches=attaches) if hindrance is None or stage in ENDED else hindrance
    yield ConditionType.READY, ready
    yield from found.items()
    why = ConditionState(stage in MOVING, result.reason, result.message)
    if unread is not None and stage not in ENDED | HELD:  # nothing else would end the job
        why = unread
    elif stage not in MOVING | ENDED:
        why = _moves(result, found, short, attaches=attaches)
    yield ConditionType.PROGRESSING, why
    at_rest = ConditionState(True, result.reason, result.message)
    for kind in (ConditionType.SUSPENDED, ConditionType.COMPLETE, ConditionType.FAILED):
        yield kind, at_rest if stage.value == kind.value else ConditionState(False, f"Not{kind.value}")
    yield ConditionType.STALLED, _stalled(result, ready)


def _stalled(result: StageResult, ready: ConditionState) -> ConditionState:
    """Returns the state of the condition Stalled. The condition holds if the job failed or its spec must change, so
    tools need not wait any longer."""
    if result.stage is Stage.FAILED:
        return ConditionState(True, result.reason, result.message)
    if ready.reason in FAULTS:
        return ConditionState(True, ready.reason, ready.message)
    return ConditionState(False, "NotStalled")


def _ready(result: StageResult, found: Parts, *, attaches: bool) -> ConditionState:
    if result.stage is Stage.COMPLETE:
        return ConditionState(True, "Completed", result.message)
    if result.stage in ENDED or result.stage in HELD:
        return ConditionState(False, result.stage.value, result.message)
    lacking = lacking_parts(found, attaches=attaches)
    if lacking:  # a fault takes precedence over a part that is merely starting
        first = min(lacking, key=lambda state: state.reason in STARTS)
        return ConditionState(False, first.reason, first.message)
    if result.stage in ATTACHED:
        pods = found[ConditionType.SIDECARS_READY].message
        text = result.message if result.stage is Stage.IDLE else f"head and feeders are serving; {pods}"
        return ConditionState(True, result.reason, text)
    return ConditionState(True, "Serving", "head, sidecars and feeders are serving; trainers are running")


def _moves(
    result: StageResult, found: Parts, short: ConditionState | None, *, attaches: bool
) -> ConditionState:
    """Returns the state of the condition Progressing. The condition holds if the job is queued, a part is recovering,
    or feeders are missing or being replaced."""
    running = result.stage in AT_WORK
    if running and result.queue is not None:
        return ConditionState(True, "Queued", result.queue.message)
    if running and (lacking := lacking_parts(found, attaches=attaches)):
        starts = result.reason == CHILDREN_START
        return ConditionState(True, CHILDREN_START if starts else "Recovering", lacking[0].message)
    if running and short is not None:
        return short
    return ConditionState(False, "AsAskedFor")
