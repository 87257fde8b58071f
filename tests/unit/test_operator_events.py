"""Which events a change of a job's status makes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from manifests import manifest

from dataloaderjob.api import parse_object
from dataloaderjob.api.status import Condition, ConditionType, DataLoaderJobStatus, Phase, TrainersStatus
from dataloaderjob_operator.decide import events
from dataloaderjob_operator.decide.events import BURST, REFILL_S, Budget, Reason, events_of

T0, T1 = "2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z"
JOB = parse_object(manifest({"metadata.uid": "u", "metadata.namespace": "team"}))


def status(
    phase: Phase,
    *,
    restarts: int = 0,
    start: str | None = T0,
    end: str | None = None,
    **held: tuple[str, ...],
) -> DataLoaderJobStatus:
    """Conditions as TYPE=(status, reason, message, since); others are False."""
    conditions = []
    for kind in ConditionType:
        given = held.get(kind.value, ())
        state, reason, message, since = (*given, *("False", "No", "", T0)[len(given) :])
        conditions.append(
            Condition(type=kind, status=state, reason=reason, message=message, last_transition_time=since)
        )
    return DataLoaderJobStatus(
        phase=phase, conditions=tuple(conditions), start_time=start, completion_time=end,
        trainers=TrainersStatus(restarts=restarts),
    )  # fmt: skip


NONE = DataLoaderJobStatus()
STARTING = status(Phase.STARTING, Ready=("False", "PodsStart"))
SERVING = status(Phase.RUNNING, Ready=("True", "Serving", "all serve", T0))
DEGRADED = status(Phase.DEGRADED, Ready=("False", "ImageNotPulled", "pod a: no such image", T1))
SUSPENDING = status(Phase.SUSPENDING, start=None)
SUSPENDED = status(Phase.SUSPENDED, start=None, Suspended=("True", "AskedFor", "spec.suspend is true"))
COMPLETE = status(
    Phase.COMPLETE, end=T1, Complete=("True", "TrainersSucceeded", "all ended with exit code 0")
)
RESUMED = [("Normal", "Resumed", "the operator recreates the job's pods")]
FAILED = status(Phase.FAILED, end=T1, Failed=("True", "DeadlineExceeded", "longer than 5"))
RESTARTED = status(
    Phase.STARTING,
    restarts=1,
    Progressing=("True", "TrainerFailed", "exit code 3; restart 1 of 3"),
    Ready=("False", "ContainerFailed", "pod a: exit code 3"),
)
SHORT = status(
    Phase.RUNNING,
    Ready=("True", "Serving", "all serve", T0),
    Progressing=("True", "FeedersMissing", "feeder pods serving: 1 of 8; no such image", T1),
)
HELD_UP = status(
    Phase.RUNNING,
    Ready=("True", "Serving", "all serve", T0),
    Progressing=(
        "True",
        "RolloutStuck",
        "the new feeders of a rolling update cannot start: no such image",
        T1,
    ),
)
IDLE = status(Phase.IDLE, Ready=("True", "Idle", "no pod is attached", T0))
NOT_FOLLOWED = status(
    Phase.SERVING,
    Ready=("True", "Serving", "all serve", T0),
    Progressing=("True", "FollowedNotRead", "the operator has no permission to read TrainJob bert", T1),
)
WITHOUT_STATUS = {
    Reason.UNKNOWN_FIELD, Reason.MANAGED_ELSEWHERE, Reason.ATTACHED, Reason.INJECTED, Reason.POD_REFUSED,
    Reason.DETACHED, Reason.NOT_ATTACHED,
}  # fmt: skip
HUNGRY = status(
    Phase.RUNNING,
    Ready=("True", "Serving", "all serve", T0),
    Progressing=("True", "OutOfMemory", "feeder-0: ran out of memory", T1),
)
SCALED = status(
    Phase.RUNNING,
    Ready=("True", "Serving", "all serve", T0),
    AutoscalingActive=("True", "Scaling", "replicas 1 -> 4: training waits", T1),
)
STUCK = status(Phase.STARTING, Ready=("False", "VolumeNotMounted", "pod a: no secret"))


@pytest.mark.parametrize(
    ("before", "after", "reported"),
    [
        pytest.param(NONE, STARTING, [("Normal", "Started", "the operator creates the job's children")], id="start"),
        pytest.param(STARTING, SERVING, [("Normal", "Serving", "all serve")], id="serving"),
        pytest.param(
            SERVING, DEGRADED, [("Warning", "Degraded", "ImageNotPulled: pod a: no such image")], id="degraded"
        ),
        pytest.param(SERVING, SCALED, [("Normal", "Scaled", "replicas 1 -> 4: training waits")], id="scaled"),
        pytest.param(DEGRADED, SERVING, [("Normal", "Recovered", "all serve")], id="recovered"),
        pytest.param(
            STARTING, STUCK, [("Warning", "NotReady", "VolumeNotMounted: pod a: no secret")], id="a-cause"
        ),
        pytest.param(
            SERVING, RESTARTED, [("Warning", "Restarted", "exit code 3; restart 1 of 3")], id="restart"
        ),
        pytest.param(SERVING, SUSPENDING, [], id="suspending"),
        pytest.param(SUSPENDING, SUSPENDED, [("Normal", "Suspended", "the job has no pods left")], id="suspended"),
        pytest.param(SUSPENDED, STARTING, RESUMED, id="resumed"),
        pytest.param(SUSPENDING, STARTING, RESUMED, id="resumed-early"),
        pytest.param(NONE, SUSPENDED, [("Normal", "Suspended", "the job has no pods left")], id="made-suspended"),
        pytest.param(SERVING, COMPLETE, [("Normal", "Completed", "all ended with exit code 0")], id="complete"),
        pytest.param(SERVING, FAILED, [("Warning", "Failed", "DeadlineExceeded: longer than 5")], id="failed"),
        pytest.param(
            SUSPENDED, COMPLETE, [("Normal", "Completed", "all ended with exit code 0")], id="ended-while-held"
        ),
    ],
)  # fmt: skip
def test_status_change_has_its_events(before, after, reported):
    assert [(e.type, e.reason.value, e.message) for e in events_of(before, after)] == reported


@pytest.mark.parametrize(
    "same", [NONE, STARTING, SERVING, DEGRADED, SUSPENDED, COMPLETE, FAILED, RESTARTED, STUCK]
)
def test_unchanged_status_has_no_event(same):
    assert events_of(same, same) == ()


def test_each_reason_belongs_to_some_change():
    every = (
        NONE,
        STARTING,
        SERVING,
        DEGRADED,
        SUSPENDING,
        SUSPENDED,
        COMPLETE,
        FAILED,
        RESTARTED,
        STUCK,
        SHORT,
        HUNGRY,
        HELD_UP,
        IDLE,
        NOT_FOLLOWED,
        SCALED,
    )
    found = {e.reason for before in every for after in every for e in events_of(before, after)}
    assert found == set(Reason) - WITHOUT_STATUS, "which no change of a status makes"


def name(before: DataLoaderJobStatus, after: DataLoaderJobStatus, job: Any = JOB) -> str:
    (event,) = events_of(before, after)
    made = events.manifest(event, job.metadata, datetime(2026, 1, 1, tzinfo=UTC), "host")
    return str(made["metadata"]["name"])


def test_same_event_has_the_same_name_and_others_differ():
    again = status(Phase.DEGRADED, Ready=("False", "ImageNotPulled", "pod b: no such image", T1))
    later = status(
        Phase.DEGRADED, Ready=("False", "ImageNotPulled", "pod a: no such image", "2026-02-01T00:00:00Z")
    )
    other = parse_object(manifest({"metadata.uid": "v", "metadata.namespace": "team"}))
    assert name(SERVING, DEGRADED) == name(SERVING, again)
    assert len({name(SERVING, DEGRADED), name(SERVING, later), name(SERVING, DEGRADED, other)}) == 3
    assert (
        len({name(NONE, STARTING), name(STARTING, SERVING), name(SERVING, FAILED), name(SERVING, COMPLETE)})
        == 4
    )


def test_recurring_cause_is_reported_once_per_attempt():
    next_attempt = status(Phase.STARTING, restarts=1, Ready=("False", "VolumeNotMounted", "", T1))
    between = status(Phase.STARTING, restarts=1, Ready=("False", "PodsStart"))
    assert name(STARTING, STUCK) == name(DEGRADED, STUCK)
    assert name(STARTING, STUCK) != name(between, next_attempt)


def test_long_message_is_cut_to_the_apis_limit():
    long = status(Phase.STARTING, Ready=("False", "VolumeNotMounted", "x" * 4000))
    (event,) = events_of(STARTING, long)
    assert len(event.message) == events.MAX_MESSAGE_NBYTES


def test_events_of_a_flapping_job_are_limited():
    budget = Budget()
    assert [budget.take("u", Reason.DEGRADED, 0.0) for _ in range(BURST + 2)] == [True] * BURST + [False] * 2
    assert budget.take("v", Reason.DEGRADED, 0.0), "another job has its own"
    assert budget.take("u", Reason.FAILED, 0.0), "an end is always reported"
    assert budget.take("u", Reason.SERVING, REFILL_S)
    assert not budget.take("u", Reason.SERVING, REFILL_S)
    budget.forget("u")
    assert budget.take("u", Reason.SERVING, REFILL_S)
