"""Every job that is not ready has a cause or a deadline in its status, whatever state its pods are in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from observed_jobs import (
    BASE,
    FEEDERS,
    HEAD,
    SUPERVISOR,
    T0,
    TRAINERS,
    after,
    condition,
    decided,
    job,
    live,
    pod,
)

from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob_operator.decide.conditions import ENDED, HELD, STARTS
from dataloaderjob_operator.decide.observed import Observed, SupervisorStatus, show_time

PLACED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": show_time(T0)}
NO_ROOM = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available",
}
GATED = {**NO_ROOM, "reason": "SchedulingGated"}
DISRUPTED = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "PreemptionByScheduler",
    "message": "preempted",
}
BACKOFF = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
OOM = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": show_time(T0)}}
STATES: dict[str, dict[str, Any] | None] = {
    "absent": None,
    "waits for its node": {"started": False, "conditions": [PLACED]},
    "unschedulable": {"started": False, "conditions": [NO_ROOM]},
    "gated": {"started": False, "conditions": [GATED]},
    "disrupted": {"conditions": [DISRUPTED]},
    "image": {
        "started": False,
        "conditions": [PLACED],
        "containerStatuses": [{"name": "c", "state": BACKOFF}],
    },
    "killed": {"phase": "Failed", "containerStatuses": [{"name": "c", "state": OOM}]},
    "evicted": {"phase": "Failed", "reason": "Evicted", "message": "disk pressure"},
    "runs": {"containerStatuses": [{"name": "c", "state": {"running": {}}}]},
    "leaves": {"containerStatuses": [{"name": "c", "state": {"running": {}}}]},
}
BOUNDED_ELSEWHERE = {"SupervisorStarts", "RayStarts", "FeedersStart"}
"""The poller takes a supervisor that does not answer for silent, which is a cause, and the supervisor names what keeps
Ray or feeders from coming up: decisions need no deadline of their own."""
SUPERVISORS = (
    None,
    SUPERVISOR,
    SupervisorStatus(silent="refused"),
    SupervisorStatus(),
    replace(SUPERVISOR, ready=0),
)


def in_state(role: str, state: str) -> list[dict[str, Any]]:
    if STATES[state] is None:
        return []
    made = pod(role, **STATES[state])
    made["metadata"] |= {"uid": role, "creationTimestamp": show_time(T0)}
    if state == "leaves":
        made["metadata"]["deletionTimestamp"] = show_time(T0)
    return [made]


@given(
    states=st.fixed_dictionaries(
        {role: st.sampled_from(sorted(STATES)) for role in ("head", "feeder", "trainer")}
    ),
    supervisor=st.sampled_from(SUPERVISORS),
    served=st.booleans(),
    failed=st.booleans(),
    refused=st.sampled_from(["", "quota"]),
    seconds=st.integers(0, 800),
)
@example({"head": "leaves", "feeder": "runs", "trainer": "runs"}, SUPERVISOR, True, False, "", 0)
def test_every_job_that_is_not_ready_has_a_cause_or_a_deadline(
    states: dict[str, str],
    supervisor: SupervisorStatus | None,
    served: bool,
    failed: bool,
    refused: str,
    seconds: int,
):
    up = {
        role: {"readyReplicas": 1} if state in ("runs", "disrupted") else {} for role, state in states.items()
    }
    trainers = (
        {"conditions": [{"type": "Failed", "status": "True"}]}
        if failed
        else {"active": int(states["trainer"] != "absent")}
    )
    children = (
        live(*BASE) | live(HEAD, **up["head"]) | live(FEEDERS, **up["feeder"]) | live(TRAINERS, **trainers)
    )
    children[TRAINERS]["spec"] = {"completions": 1}
    pods = tuple(made for role, state in states.items() for made in in_state(role, state))
    observed = Observed(job=job(), children=children, pods=pods, supervisor=supervisor, refused=refused)
    started = after(observed, decided(observed))
    if served and "absent" not in (
        states["head"],
        states["feeder"],
    ):  # a Deployment that makes no pods says why itself
        started = replace(started, status=started.status.model_copy(update={"phase": Phase.RUNNING}))
    made = decided(started, seconds)
    ready = condition(made, ConditionType.READY)
    if ready.status == "True" or made.status.phase.value in {stage.value for stage in ENDED | HELD}:
        return
    moves = condition(made, ConditionType.PROGRESSING)
    cause = ready.message and (ready.reason not in STARTS or "pod mnist" in ready.message)
    cause = cause or ready.reason in BOUNDED_ELSEWHERE
    cause = cause or (made.status.trainers.restarts and moves.message)
    assert cause or made.requeue_after_s is not None, (ready, made.status.phase)
