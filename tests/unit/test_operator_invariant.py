"""Every job that is not ready has a cause or a deadline in its status, whatever state its pods are in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import Phase as Part
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from observed_jobs import (
    BASE,
    FEEDERS,
    HEAD,
    SUPERVISOR,
    T0,
    TRAINERS,
    after,
    decided,
    job,
    live,
    pod,
)
from simulated_cluster import RUNS, Cluster

from dataloaderjob.api.status import ConditionType, DataLoaderJobStatus, Phase
from dataloaderjob_operator.client import ApiError
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
    assert ready_or_explained(made.status) or made.requeue_after_s is not None, made.status


def ready_or_explained(status: DataLoaderJobStatus) -> bool:
    """Checks whether a job is ready, has ended or is held, or has a cause for not being ready."""
    ready, moves = status.condition(ConditionType.READY), status.condition(ConditionType.PROGRESSING)
    assert ready is not None
    assert moves is not None
    if ready.status == "True" or status.phase.value in {stage.value for stage in ENDED | HELD}:
        return True
    named = bool(ready.message) and (ready.reason not in STARTS or "pod mnist" in ready.message)
    restarts = bool(status.trainers.restarts and moves.message)
    return named or ready.reason in BOUNDED_ELSEWHERE or restarts


FAILURES = (
    ApiError(0, "no answer"),
    ApiError(409, "changed"),
    ApiError(429, "slow down"),
    ApiError(500, 'failed calling webhook "v.example.com"'),
    ApiError(403, "exceeded quota"),
)
TWO_SERVE = replace(SUPERVISOR, desired=2, ready=2)
REPORTS = (
    None, TWO_SERVE, SUPERVISOR, SupervisorStatus(), replace(SUPERVISOR, ready=0), SupervisorStatus(silent="timeout"),
    SupervisorStatus(silent="timeout", hung=True),
)  # fmt: skip


class Simulation(RuleBasedStateMachine):
    """Everything that happens to a job on a cluster, in any order. After each step the operator has its say."""

    @initialize(up=st.sampled_from([True, True, True, False]))
    def begin(self, up: bool) -> None:
        self.cluster = Cluster()
        self.wait: float | None = None
        self.error: ApiError | None = None
        if up:
            self.comes_up()

    @precondition(lambda self: self.cluster.pods())
    @rule(data=st.data(), state=st.sampled_from(sorted(set(STATES) - {"absent", "leaves"})))
    def a_pod_changes(self, data: st.DataObject, state: str) -> None:
        pod = data.draw(st.sampled_from(self.cluster.pods()))
        told = dict(STATES[state] or {})
        starts = not told.pop("started", True)
        if starts and pod["status"].get("phase") != "Pending":
            return  # no pod that has run starts again
        phase = "Pending" if starts else "Running"
        self.cluster.report(pod, state, **{"phase": phase, **told})
        self.cluster.control()

    @rule()
    def comes_up(self) -> None:
        """All that waits starts, and the feeders serve."""
        self.cluster.reported = TWO_SERVE
        for _ in range(3):
            self.cluster.settle()
            self.cluster.control()
            for found in self.cluster.pods():
                if self.cluster.states.get(found["metadata"]["name"]) not in ("lost", "stuck"):
                    self.cluster.report(found, "runs", **RUNS)
            self.cluster.control()

    @precondition(lambda self: self.cluster.pods())
    @rule(data=st.data(), how=st.sampled_from(["deleted", "stuck", "lost"]))
    def a_pod_leaves(self, data: st.DataObject, how: str) -> None:
        pod = data.draw(st.sampled_from(self.cluster.pods()))
        if how == "lost":
            self.cluster.lose_node(pod)
            return
        self.cluster.states[pod["metadata"]["name"]] = how
        self.cluster.delete(pod)

    @rule(held=st.booleans())
    def kueue_decides(self, held: bool) -> None:
        self.cluster.suspend(held)
        self.the_cluster_acts()

    @rule(asked=st.booleans())
    def the_user_suspends(self, asked: bool) -> None:
        self.cluster.edit(suspend=asked)

    @rule(replicas=st.integers(1, 4))
    def the_user_scales(self, replicas: int) -> None:
        self.cluster.edit(feeders={"replicas": replicas, "minAvailable": 1})

    @rule(report=st.sampled_from(REPORTS))
    def the_supervisor_reports(self, report: SupervisorStatus | None) -> None:
        self.cluster.reported = report

    @rule(passing=st.integers(0, 6), error=st.sampled_from(FAILURES), times=st.integers(1, 4))
    def the_api_server_fails(self, passing: int, error: ApiError, times: int) -> None:
        self.cluster.failing = [None] * passing + [error] * times

    @rule(seconds=st.sampled_from([1, 10, 61, 300, 1000]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.pass_time(seconds)

    @rule()
    def the_cluster_acts(self) -> None:
        self.cluster.collect_garbage()
        self.cluster.control()

    @rule()
    def the_operator_restarts(self) -> None:
        self.cluster.restart_operator()

    @invariant()
    def what_is_not_ready_has_a_cause_or_a_deadline(self) -> None:
        wait, error = self.cluster.settle()
        if error is not None or wait is not None:  # it is repeated, or looked at again
            return
        status = DataLoaderJobStatus.model_validate(self.cluster.status)
        assert ready_or_explained(status), status


def test_whatever_happens_to_a_job_it_is_ready_or_has_a_cause_or_a_deadline() -> None:
    bounded = settings(
        max_examples=130,
        stateful_step_count=12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Part.generate],  # to shrink what fails takes minutes
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Simulation, settings=bounded)
