"""A job that queues says so, and is not failed for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from observed_jobs import BASE, FEEDERS, HEAD, TRAINERS, after, condition, decided, job, live, pod, serving

from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob_operator.decide.events import Reason, events_of
from dataloaderjob_operator.decide.observed import Observed

WORDS = "0/9 nodes are available: 9 Insufficient nvidia.com/gpu."
NO_ROOM = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": WORDS}
GATED = {**NO_ROOM, "reason": "SchedulingGated", "message": "Scheduling is blocked due to non-empty gates"}
PLACED = {"type": "PodScheduled", "status": "True"}
DAY_S = 86_400.0


def waits(role: str, found: dict[str, Any] = NO_ROOM) -> dict[str, Any]:
    return pod(role, started=False, conditions=[found])


def starts(*pods: dict[str, Any], **spec: Any) -> Observed:
    """A job none of whose parts serves yet."""
    return Observed(job=job(**spec), children=live(*BASE, HEAD, FEEDERS, TRAINERS), pods=pods)


def suspended_job(**spec: Any) -> Observed:
    """As Kueue holds it."""
    observed = starts(pod("head"), pod("feeder"), **spec)
    held = {**observed.children[TRAINERS], "spec": {"suspend": True}}
    return replace(observed, children={**observed.children, TRAINERS: held})


QUEUES = {
    "no node has room": (starts(pod("head"), pod("feeder"), waits("trainer")), "Unschedulable", WORDS),
    "the head has no room": (starts(waits("head"), pod("feeder"), pod("trainer")), "Unschedulable", WORDS),
    "no feeder has room": (starts(pod("head"), waits("feeder"), pod("trainer")), "Unschedulable", WORDS),
    "gated": (starts(pod("head"), waits("trainer", GATED)), "SchedulingGated", "Scheduling is blocked"),
    "its Job is suspended": (suspended_job(), "JobSuspended", "Job mnist-trainers-0 is suspended"),
}


@pytest.mark.parametrize("case", list(QUEUES))
def test_queued_job_reports_the_cause_and_does_not_fail(case: str) -> None:
    observed, reason, words = QUEUES[case]
    first = decided(observed)
    made = decided(after(observed, first), 30 * DAY_S)
    assert made.status.phase == Phase.QUEUED
    ready, moving = (condition(made, kind) for kind in (ConditionType.READY, ConditionType.PROGRESSING))
    assert (ready.reason, moving.reason, moving.status) == (reason, "Queued", "True")
    assert words in ready.message
    assert words in moving.message
    assert made.status.scheduled_time is None
    assert made.requeue_after_s is None, "no deadline is under way"


def test_the_startup_deadline_counts_from_the_end_of_the_queue() -> None:
    queues = starts(pod("head"), pod("feeder"), waits("trainer"), startupDeadlineSeconds=200)
    queued = decided(after(queues, decided(queues)), DAY_S)
    placed = replace(queues, pods=(pod("head"), pod("feeder"), waits("trainer", PLACED)))
    admitted = decided(after(placed, queued), DAY_S)
    assert (admitted.status.phase, admitted.status.scheduled_time) == (Phase.STARTING, "2026-01-02T00:00:00Z")
    assert decided(after(placed, admitted), DAY_S + 199).status.phase == Phase.STARTING
    late = decided(after(placed, admitted), DAY_S + 200)
    assert condition(late, ConditionType.FAILED).reason == "StartupDeadlineExceeded"


def test_requeued_job_has_the_full_startup_time_afterwards() -> None:
    placed = starts(pod("head"), pod("feeder"), waits("trainer", PLACED))
    began = decided(placed)
    again = replace(placed, pods=(pod("head"), pod("feeder"), waits("trainer")))
    assert decided(after(again, began), 2000).status.scheduled_time is None


def test_optional_queued_feeders_do_not_stop_the_startup_clock() -> None:
    observed = starts(pod("head"), pod("feeder"), waits("feeder"), pod("trainer"))
    made = decided(observed)
    assert (made.status.phase, made.requeue_after_s) == (Phase.STARTING, 900)


def test_active_deadline_includes_time_in_the_queue() -> None:
    observed = starts(waits("trainer"), activeDeadlineSeconds=60)
    first = decided(observed)
    assert first.requeue_after_s == 60
    made = decided(after(observed, first), 60)
    assert condition(made, ConditionType.FAILED).reason == "DeadlineExceeded"


def test_job_with_preempted_trainers_queues_without_a_startup_deadline() -> None:
    observed = serving()
    runs = decided(observed)
    preempted = replace(observed, pods=(pod("head"), pod("feeder"), waits("trainer")))
    queued = decided(after(preempted, runs), 10)
    assert queued.status.phase == Phase.QUEUED
    placed = replace(observed, pods=(pod("head"), pod("feeder"), waits("trainer", PLACED)))
    back = decided(after(placed, queued), DAY_S)
    assert back.status.phase == Phase.DEGRADED
    assert decided(after(placed, back), 2 * DAY_S).status.phase == Phase.DEGRADED


def test_evicted_pod_does_not_hide_the_state_of_its_replacement() -> None:
    evicted = pod("head", phase="Failed", reason="Evicted", message="disk pressure")
    evicted["metadata"]["name"] = "mnist-head-before"
    made = decided(starts(evicted, waits("head"), pod("feeder"), pod("trainer")))
    ready = condition(made, ConditionType.READY)
    assert (made.status.phase, ready.reason) == (Phase.QUEUED, "Unschedulable")
    assert "pod mnist-head-0" in ready.message
    made = decided(starts(evicted, waits("head", PLACED), pod("feeder"), pod("trainer")))
    assert (made.status.phase, condition(made, ConditionType.READY).reason) == (Phase.STARTING, "Evicted")


def test_running_trainers_do_not_queue_although_the_head_does() -> None:
    observed = serving()
    children = {**observed.children, **live(HEAD)}
    homeless = replace(observed, children=children, pods=(waits("head"), pod("feeder"), pod("trainer")))
    assert decided(after(homeless, decided(observed)), 10).status.phase == Phase.DEGRADED


def test_scheduler_message_is_in_an_event() -> None:
    observed = starts(pod("head"), pod("feeder"), waits("trainer"))
    made = decided(after(observed, decided(starts())))
    (event,) = events_of(decided(starts()).status, made.status)
    assert (event.reason, WORDS in event.message) == (Reason.NOT_READY, True)


def test_events_of_a_held_job_are_not_looked_up() -> None:
    made = decided(suspended_job())
    assert not any(query.kind == "Job" for query in made.event_queries)
