"""Every job that is not ready has a cause or a deadline in its status, whatever state its pods are in: a cause names
what is really in the way, and the operator looks again when a deadline is over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import Phase as Part
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
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
from simulated_cluster import REFUSAL, RUNS, WORKS, Cluster, Restart

from dataloaderjob.api import KIND
from dataloaderjob.api.status import Condition, ConditionType, DataLoaderJobStatus, Phase
from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.conditions import FAULTS
from dataloaderjob_operator.decide.health import WAITS, suspended
from dataloaderjob_operator.decide.job_parts import STARTS
from dataloaderjob_operator.decide.observed import (
    Observed,
    SupervisorStatus,
    has_condition,
    leaving,
    parse_time,
    show_time,
)
from dataloaderjob_operator.decide.stages import ENDED, HELD
from dataloaderjob_operator.names import Role

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
WORDS = {
    "unschedulable": "0/3 nodes are available", "gated": "0/3 nodes are available", "disrupted": "preempted",
    "image": "no such image", "killed": "OOM-killed", "evicted": "disk pressure",
}  # fmt: skip
"""Words of the causes of states, but of those with which nothing is wrong."""
BOUNDED_ELSEWHERE = {"SupervisorStarts", "RayStarts", "FeedersStart"}
"""The poller takes a supervisor that does not answer for silent, which is a cause, and the supervisor names what keeps
Ray or feeders from coming up: decisions need no deadline of their own."""
PARTS = {
    ConditionType.HEAD_READY: Role.HEAD,
    ConditionType.FEEDERS_READY: Role.FEEDER,
    ConditionType.SIDECARS_READY: Role.TRAINER,
    ConditionType.TRAINERS_READY: Role.TRAINER,
}
BY_SUPERVISOR = BOUNDED_ELSEWHERE | {"SupervisorSilent"}
OVER, AT_REST = ({Phase(stage.value) for stage in stages} for stages in (ENDED, HELD))
STARTUP = timedelta(seconds=900)
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


@settings(deadline=None, derandomize=True, max_examples=300)
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
def test_every_unready_job_has_a_cause_or_a_deadline(
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
    for kind, role in PARTS.items():
        part, words = of(made.status, kind), (WORDS | {"leaves": "has been terminating"}).get(states[role])
        if (
            words
            and part.status != "True"
            and made.status.phase not in OVER
            and part.reason not in BY_SUPERVISOR
        ):
            assert names_one_of({f"mnist-{role}-0": words}, part.message), part


def ready_or_explained(status: DataLoaderJobStatus) -> bool:
    """Checks whether a job is ready, has ended or is held, or has a cause for not being ready."""
    ready, moves = of(status, ConditionType.READY), of(status, ConditionType.PROGRESSING)
    if ready.status == "True" or status.phase.value in {stage.value for stage in ENDED | HELD}:
        return True
    named = bool(ready.message) and (ready.reason not in STARTS or "pod mnist" in ready.message)
    told = bool(moves.message) and (status.trainers.restarts > 0 or moves.reason == "Queued")
    return named or ready.reason in BOUNDED_ELSEWHERE or told


def judge(cluster: Cluster) -> None:
    """Compares a status with what the cluster knows."""
    status, now = DataLoaderJobStatus.model_validate(cluster.status), cluster.api.moment
    ready, moves = of(status, ConditionType.READY), of(status, ConditionType.PROGRESSING)
    assert ready.reason not in FAULTS, ready
    assert ready.reason != "ChildRefused" or cluster.refusals, "the API server takes all children"
    for restart in cluster.restarts:
        assert tells_why(restart), restart
    if status.phase in OVER:
        return
    assert cluster.refusals < 2 or REFUSAL.message in ready.message, ready
    if status.phase in AT_REST:
        assert status.phase is Phase.SUSPENDED or is_awaited(cluster, cluster.bounds()), status
    else:
        judge_parts(cluster, status, ready)
        assert trainers_are_there_or_awaited(cluster, status), status
        assert started_in_time(cluster, status), status
        assert cluster.judged_by() is None or names_one_of(cluster.culprits(), moves.message), moves
        assert not pauses(cluster, status) or str(status.trainers.next_start) in moves.message, moves
    due = [moment for moment in moments(cluster, status) if moment > now]
    if due and not cluster.refusals:  # what is refused is repeated
        assert cluster.due is not None, f"nobody looks again at {min(due)}"
        assert cluster.due <= min(due), f"nobody looks again at {min(due)}"


def judge_parts(cluster: Cluster, status: DataLoaderJobStatus, ready: Condition) -> None:
    """Each part that does not serve says what is in its way, and the job has one of these causes."""
    lacking = [part for part in (of(status, kind) for kind in PARTS) if part.status != "True"]
    for part in lacking:
        assert is_explained(cluster, status, part), (part, cluster.in_the_way(PARTS[part.type]))
    if ready.status == "True":
        assert not lacking
        assert cluster.works(Role.TRAINER), "trainers that do not run"
    elif not cluster.refusals:
        causes = [part for part in lacking if part.reason not in STARTS] or lacking
        assert (ready.reason, ready.message) in [(part.reason, part.message) for part in causes]


def is_explained(cluster: Cluster, status: DataLoaderJobStatus, part: Condition) -> bool:
    """Checks whether the cause that a part names is the one that it has; one that merely starts has a deadline."""
    role, trainers = PARTS[part.type], cluster.trainers()
    match part.reason:
        case "NotMade":
            return cluster.refusals > 0
        case "JobSuspended":
            return trainers is not None and suspended(trainers)
        case reason if reason == WAITS:
            return trainers is None and status.feeders.ready == 0
        case reason if reason in BY_SUPERVISOR:
            return cluster.works(role) and reason == by_supervisor(role, cluster.reported)
    found = cluster.in_the_way(role)
    if found and names_one_of(found, part.message):
        return True
    if part.reason == "PodsLeave" and not any(
        pod["metadata"]["name"] in part.message for pod in cluster.pods(role)
    ):
        return cluster.due is not None  # it has just gone: a message alone is written anew some seconds later
    if any(without_digits(words) in without_digits(part.message) for words in found.values()):
        return cluster.due is not None  # so is one in which only the pod changes
    if found:
        return False
    return cluster.due is not None or cluster.to_be_made(role)


def without_digits(text: str) -> str:
    return re.sub(r"\d+", "", text)


def by_supervisor(role: Role, report: SupervisorStatus | None) -> str:
    """The reason for which a role whose pods are ready does not serve."""
    if role is Role.FEEDER:
        return "FeedersStart"
    if report is None:
        return "SupervisorStarts"
    return "SupervisorSilent" if report.silent else "RayStarts"


def tells_why(restart: Restart) -> bool:
    """Checks whether a further attempt names a pod of the one before that was in the way."""
    if restart.reason != "PodsStuck":
        return names_one_of(restart.culprits, restart.message)
    stuck = dict.fromkeys(restart.culprits, "should have terminated")
    return names_one_of(stuck, restart.message) if stuck else "Job mnist-trainers" in restart.message


def names_one_of(culprits: Mapping[str, str], message: str) -> bool:
    known = {pod: words for pod, words in culprits.items() if words}
    return not known or any(f"pod {pod}" in message and words in message for pod, words in known.items())


def trainers_are_there_or_awaited(cluster: Cluster, status: DataLoaderJobStatus) -> bool:
    """Checks whether the trainers' Job is there and may work, or what it waits for ends by itself."""
    live = cluster.trainers()
    if live is None and (status.feeders.ready == 0 or cluster.refusals or pauses(cluster, status)):
        return True
    if live is not None and not leaving(live) and not has_condition(live, "Failed"):
        return True
    return is_awaited(cluster, [*cluster.bounds(Role.TRAINER), *cluster.name_bounds(), cluster.judged_by()])


def pauses(cluster: Cluster, status: DataLoaderJobStatus) -> bool:
    """Checks whether the next attempt is put off."""
    start = status.trainers.next_start
    return cluster.trainers() is None and start is not None and parse_time(start) > cluster.api.moment


def started_in_time(cluster: Cluster, status: DataLoaderJobStatus) -> bool:
    """Checks that a job starts for no longer than its deadline, unless only a word of its supervisor is missing."""
    if status.phase is not Phase.STARTING or status.scheduled_time is None or cluster.refusals:
        return True
    late = parse_time(status.scheduled_time) + STARTUP <= cluster.api.moment
    return not late or all(map(cluster.works, Role))


def is_awaited(cluster: Cluster, ends: Iterable[datetime | None]) -> bool:
    """Checks whether the cluster still has something to delete, or one of these moments is still to come."""
    return cluster.garbage() or any(moment and moment > cluster.api.moment for moment in ends)


def moments(cluster: Cluster, status: DataLoaderJobStatus) -> Iterator[datetime]:
    """Moments at which time alone changes something."""
    yield from cluster.bounds()
    if status.phase in AT_REST:
        return
    yield from cluster.name_bounds()
    if (judged := cluster.judged_by()) is not None:
        yield judged
    if pauses(cluster, status):
        yield parse_time(str(status.trainers.next_start))
    if status.phase is Phase.STARTING and status.scheduled_time is not None:
        yield parse_time(status.scheduled_time) + STARTUP


def of(status: DataLoaderJobStatus, kind: ConditionType) -> Condition:
    found = status.condition(kind)
    assert found is not None
    return found


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
    """Everything that happens to a job on a cluster, in any order. After each step the operator has its say, if it has
    heard of something or asked for it."""

    @initialize(up=st.sampled_from([True, True, True, False]))
    def begin(self, up: bool) -> None:
        self.cluster = Cluster()
        if up:
            self.comes_up()

    def _a_pod(self, data: st.DataObject, *states: str) -> dict[str, Any] | None:
        """A pod that has not ended, in one of these states, if any are given; None if there is none."""
        found = {
            pod["metadata"]["name"]: pod
            for pod in self.cluster.pods()
            if pod["status"].get("phase") != "Failed"
            and (not states or self.cluster.states.get(pod["metadata"]["name"]) in states)
        }
        return found[data.draw(st.sampled_from(list(found)))] if found else None

    def _change(self, found: dict[str, Any], state: str) -> None:
        told = dict(STATES[state] or {})
        phase = "Running" if told.pop("started", True) else "Pending"
        if (
            phase == "Running" or found["status"].get("phase") == "Pending"
        ):  # no pod that has run starts again
            self.cluster.report(found, state, WORDS.get(state, ""), **{"phase": phase, **told})
            self.cluster.control()

    @rule(data=st.data(), state=st.sampled_from(sorted(set(STATES) - {"absent", "leaves"})))
    def a_pod_changes(self, data: st.DataObject, state: str) -> None:
        if (found := self._a_pod(data)) is not None:
            self._change(found, state)

    @rule(state=st.sampled_from(["unschedulable", "image"]))
    def nothing_starts_any_more(self, state: str) -> None:
        for found in self.cluster.pods():
            if found["status"].get("phase") == "Pending":
                self._change(found, state)

    @rule()
    def comes_up(self) -> None:
        """All that waits starts, and the feeders serve."""
        self.cluster.say(TWO_SERVE)
        for _ in range(3):
            self.cluster.operate()
            self.cluster.collect_garbage()
            self.cluster.control()
            for found in self.cluster.pods():
                runs = self.cluster.states.get(found["metadata"]["name"]) == "runs"
                if not runs and not leaving(found) and found["status"].get("phase") != "Failed":
                    self.cluster.report(found, "runs", **RUNS)
            self.cluster.control()

    @rule(data=st.data())
    def a_node_is_lost(self, data: st.DataObject) -> None:
        pod = self._a_pod(data, *WORKS)
        if pod is not None:
            self.cluster.lose_node(pod)
            self.cluster.control()

    @rule(data=st.data(), sticks=st.booleans())
    def a_pod_is_deleted(self, data: st.DataObject, sticks: bool) -> None:
        pod = self._a_pod(data)
        if pod is not None:
            self.cluster.delete(pod)
            self.cluster.sticks |= {pod["metadata"]["name"]} if sticks else set()

    @rule(data=st.data())
    def a_pod_is_preempted(self, data: st.DataObject) -> None:
        pod = self._a_pod(data, *WORKS)
        if pod is not None:
            self.cluster.report(pod, "disrupted", WORDS["disrupted"], **RUNS, conditions=[DISRUPTED])
            self.cluster.delete(self.cluster.api.objects["Pod", pod["metadata"]["name"]])
            self.cluster.control()

    @rule(held=st.booleans())
    def kueue_decides(self, held: bool) -> None:
        self.cluster.suspend(held)
        self.the_cluster_acts()

    @rule(asked=st.booleans())
    def the_user_suspends(self, asked: bool) -> None:
        self.cluster.edit(suspend=asked)

    @rule()
    def the_user_starts_it_anew(self) -> None:
        """By holding it for a moment."""
        for asked in (True, False):
            self.cluster.edit(suspend=asked)
            self.cluster.operate()
            self.cluster.collect_garbage()

    @rule(replicas=st.integers(1, 4))
    def the_user_scales(self, replicas: int) -> None:
        self.cluster.edit(feeders={"replicas": replicas, "minAvailable": 1})

    @rule(report=st.sampled_from(REPORTS))
    def the_supervisor_reports(self, report: SupervisorStatus | None) -> None:
        self.cluster.say(report)

    @rule(passing=st.integers(0, 6), error=st.sampled_from(FAILURES), times=st.integers(1, 4))
    def the_api_server_fails(self, passing: int, error: ApiError, times: int) -> None:
        self.cluster.failing = [None] * passing + [error] * times

    @rule(kind=st.sampled_from([None, "ConfigMap", "Deployment", "Job"]))
    def the_api_server_refuses(self, kind: str | None) -> None:
        """Children of one kind, or none any more."""
        self.cluster.refused_kind = kind

    @rule(refused=st.booleans())
    def somebody_scales_the_deployment(self, refused: bool) -> None:
        """And puts it back the next time. `refused`: the operator cannot."""
        if refused:
            self.cluster.refused_kind = "Deployment"
        live = self.cluster.api.objects.get(FEEDERS)
        if live is not None:
            wanted = self.cluster.api.objects[KIND, "mnist"]["spec"]["feeders"]["replicas"]
            replicas = wanted if live["spec"]["replicas"] != wanted else wanted + 1
            self.cluster.put({**live, "spec": {**live["spec"], "replicas": replicas}})

    @rule(seconds=st.sampled_from([1, 10, 61, 300, 1000]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.pass_time(seconds)

    @rule()
    def the_operator_looks_again(self) -> None:
        """It is as long as it has asked for that nothing happens."""
        if self.cluster.due is not None:
            self.cluster.pass_time((self.cluster.due - self.cluster.api.moment).total_seconds())

    @rule()
    def the_cluster_acts(self) -> None:
        self.cluster.collect_garbage()
        self.cluster.control()

    @rule()
    def the_operator_restarts(self) -> None:
        self.cluster.restart_operator()

    @invariant()
    def what_is_not_ready_has_a_cause_or_a_deadline(self) -> None:
        self.cluster.operate()
        if self.cluster.disturbed:  # it is repeated, and there may be no status yet
            assert self.cluster.due is not None
        else:
            judge(self.cluster)


@pytest.mark.parametrize("examples", [80, pytest.param(250, marks=pytest.mark.nightly)])
def test_job_is_always_ready_or_has_a_cause_or_a_deadline(examples: int) -> None:
    bounded = settings(
        max_examples=examples,
        stateful_step_count=14,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Part.generate],  # to shrink what fails takes minutes
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Simulation, settings=bounded)
