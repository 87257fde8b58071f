"""What the operator decides about a job that it observes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from observed_jobs import (
    BASE,
    FEEDERS,
    HEAD,
    SETUP,
    SUPERVISOR,
    T0,
    TRAINERS,
    after,
    condition,
    decided,
    failed_trainers,
    job,
    keys,
    live,
    pod,
    serving,
)  # fmt: skip

from dataloaderjob.api.sidecar import SIDECAR
from dataloaderjob.api.status import ConditionType, DataLoaderJobStatus, Phase
from dataloaderjob_operator.decide.decision import COUNTS_EVERY_S, WORKLOADS, Decision, decide
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.decide.stages import WANTED, ChildPart, Stage
from dataloaderjob_operator.objects.pods import map_of


def test_new_job_gets_all_conditions_and_all_children():
    made = decided(Observed(job=job()))
    assert [c.type for c in made.status.conditions] == [kind.value for kind in ConditionType]
    assert made.status.phase == Phase.STARTING
    assert made.status.observed_generation == 1
    assert keys(made) == BASE | {HEAD, FEEDERS}
    assert made.later[-1]["metadata"]["name"] == "mnist-trainers-0"
    assert made.delete == ()
    assert made.requeue_after_s == 900, "the startup deadline"


def test_a_job_of_another_controller_is_left_alone():
    assert decide(Observed(job=job(managedBy="example.com/other")), SETUP, T0) is None


def test_repeated_decision_without_a_change_is_identical():
    observed = serving()
    first = decided(observed)
    assert first.status.phase == Phase.RUNNING
    assert condition(first, ConditionType.READY).status == "True"
    again = decided(after(observed, first), 500)
    assert again.status == first.status, "not even a time"
    assert again.apply == first.apply


def test_failing_part_degrades_a_running_job_with_the_cause():
    observed = serving()
    running = after(observed, decided(observed))
    sick = pod(
        "feeder",
        containerStatuses=[
            {
                "name": "feeder",
                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            }
        ],
    )
    lost = replace(
        running, children={**running.children, **live(FEEDERS, replicas=1)}, pods=(sick, pod("trainer")),
        supervisor=replace(SUPERVISOR, ready=0),
    )  # fmt: skip
    made = decided(lost, 60)
    assert made.status.phase == Phase.DEGRADED
    ready = condition(made, ConditionType.READY)
    assert (ready.status, ready.reason) == ("False", "ImageNotPulled")
    assert "pod mnist-feeder-0, container feeder: ImagePullBackOff: no such image" in ready.message
    assert ready.last_transition_time == "2026-01-01T00:01:00Z"
    assert made.status.feeders.summary == "0/1"
    assert (
        condition(decided(after(lost, made), 99), ConditionType.READY).last_transition_time
        == ready.last_transition_time
    )


def test_missing_trainer_image_keeps_the_job_from_being_ready():
    image = {
        "name": "trainer",
        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
    }
    observed = replace(
        serving(), pods=(pod("head"), pod("trainer", phase="Pending", containerStatuses=[image]))
    )
    made = decided(observed)
    assert made.status.phase == Phase.STARTING
    assert condition(made, ConditionType.SIDECARS_READY).status == "True"
    for kind in (ConditionType.TRAINERS_READY, ConditionType.READY):
        found = condition(made, kind)
        assert (found.status, found.reason) == ("False", "ImageNotPulled")
        assert "pod mnist-trainer-0, container trainer" in found.message
    late = decided(after(observed, made), 901)
    assert late.status.phase == Phase.FAILED
    assert "no such image" in condition(late, ConditionType.FAILED).message


def test_ready_reports_faults_before_parts_that_are_merely_starting():
    image = {
        "name": "trainer",
        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
    }
    sick = pod("trainer", started=False, containerStatuses=[image])
    made = decided(
        replace(serving(), pods=(sick,), children=live(*BASE, HEAD, FEEDERS, TRAINERS), supervisor=None)
    )
    assert condition(made, ConditionType.HEAD_READY).reason == "PodsStart"
    assert condition(made, ConditionType.READY).reason == "ImageNotPulled"


def test_trainer_that_finished_early_still_counts_as_ready():
    ended = [{"name": "trainer", "state": {"terminated": {"exitCode": 0}}}]
    observed = replace(
        serving(), pods=(pod("head"), pod("trainer", phase="Succeeded", containerStatuses=ended))
    )
    assert condition(decided(observed), ConditionType.READY).status == "True"


def test_sidecar_that_ends_with_its_trainer_is_not_missed():
    ended = {"state": {"terminated": {"exitCode": 0}}}
    status = {
        "containerStatuses": [{"name": "trainer", **ended}], "initContainerStatuses": [{"name": SIDECAR, **ended}]
    }  # fmt: skip
    observed = serving()
    over = replace(
        after(observed, decided(observed)), pods=(pod("head"), pod("feeder"), pod("trainer", **status))
    )
    assert decided(over).status.phase == Phase.RUNNING


def test_pods_refused_by_a_quota_are_reported_by_their_deployment():
    observed = serving()
    refused = {
        "conditions": [
            {
                "type": "ReplicaFailure",
                "status": "True",
                "reason": "FailedCreate",
                "message": "exceeded quota",
            }
        ]
    }
    children = {**observed.children, **live(FEEDERS, **refused)}
    made = decided(replace(observed, children=children, pods=(), supervisor=None))
    assert condition(made, ConditionType.FEEDERS_READY).message == (
        "exceeded quota; change this pod's resources in spec.feeders.resources"
    )


def test_child_refused_by_the_server_is_reported_with_its_message():
    observed = serving()
    made = decided(
        replace(after(observed, decided(observed)), refused="pods is forbidden: exceeded quota"), 5
    )
    ready = condition(made, ConditionType.READY)
    assert (ready.status, ready.reason, ready.message) == (
        "False",
        "ChildRefused",
        "pods is forbidden: exceeded quota",
    )
    assert condition(decided(after(observed, made)), ConditionType.READY).status == "True"


def test_successful_end_deletes_head_and_feeders_and_keeps_logs():
    observed = serving()
    running = after(observed, decided(observed))
    done = replace(
        running,
        children={
            **running.children,
            **live(TRAINERS, succeeded=1, conditions=[{"type": "Complete", "status": "True"}]),
        },
    )
    made = decided(done, 77)
    assert made.status.phase == Phase.COMPLETE
    assert made.status.completion_time == "2026-01-01T00:01:17Z"
    assert set(made.delete) == {HEAD, FEEDERS}
    assert keys(made) == BASE
    assert condition(made, ConditionType.COMPLETE).status == "True"
    assert condition(made, ConditionType.READY).status == "True"
    assert condition(made, ConditionType.READY).reason == "Completed"
    assert made.requeue_after_s is None
    gone = decided(after(done, made, children={}, pods=()), 99)
    assert (gone.status.phase, gone.status.completion_time) == (Phase.COMPLETE, made.status.completion_time)


def test_finished_job_is_deleted_after_its_time_to_live():
    status = decided(
        replace(serving(), children=live(TRAINERS, conditions=[{"type": "Complete", "status": "True"}]))
    ).status
    observed = Observed(job=job(ttlSecondsAfterFinished=60), status=status)
    assert (decided(observed, 59).delete_job, decided(observed, 59).requeue_after_s) == (False, 1)
    assert decided(observed, 60).delete_job


def test_failed_trainer_restarts_the_group_once_the_old_one_is_deleted():
    observed = replace(serving(), job=job(**{"trainers.job.failurePolicy.backoffSeconds": 0}))
    running = after(observed, decided(observed))
    failed = failed_trainers(running)
    made = decided(failed, 10)
    assert made.status.trainers.restarts == 1
    assert made.delete == (TRAINERS,)
    assert not any(key[0] == "Job" for key in keys(made))
    progressing = condition(made, ConditionType.PROGRESSING)
    assert progressing.status == "True"
    again = decided(after(failed, made), 11)
    assert again.status.trainers.restarts == 1, "one incident counts once"
    assert again.delete == (TRAINERS,)
    free = decided(after(failed, again, children={}, pods=()), 12)
    assert ("Job", "mnist-trainers-1") in keys(free)


def test_too_many_trainer_failures_fail_the_job_with_the_cause():
    observed = replace(serving(), job=job(**{"trainers.job.failurePolicy": {"maxRestarts": 0}}))
    made = decided(failed_trainers(after(observed, decided(observed))), 10)
    assert made.status.phase == Phase.FAILED
    reported = condition(made, ConditionType.FAILED)
    assert reported.reason == "MaxRestartsExceeded"
    assert "container trainer: exit code 7: CUDA error (failurePolicy.maxRestarts 0)" in reported.message
    assert TRAINERS not in made.delete, "its pods have the logs"


def test_job_that_misses_its_startup_deadline_fails_with_the_cause():
    waiting = {"name": "feeder", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
    observed = Observed(
        job=job(startupDeadlineSeconds=200), pods=(pod("feeder", containerStatuses=[waiting]),)
    )
    first = decided(observed)
    assert decided(after(observed, first), 199).status.phase == Phase.STARTING
    late = decided(after(observed, first), 200)
    reported = condition(late, ConditionType.FAILED)
    assert (late.status.phase, reported.reason) == (Phase.FAILED, "StartupDeadlineExceeded")
    assert "ErrImagePull: not found" in reported.message


def test_the_startup_deadline_is_met_once_all_served():
    observed = serving()
    running = after(observed, decided(observed))
    lost = replace(running, children={**running.children, **live(HEAD)})
    assert decided(lost, 5000).status.phase == Phase.DEGRADED


def test_a_job_ends_at_its_active_deadline():
    observed = replace(serving(), job=job(activeDeadlineSeconds=100))
    first = decided(observed)
    assert first.requeue_after_s == 100
    assert condition(decided(after(observed, first), 100), ConditionType.FAILED).reason == "DeadlineExceeded"


def test_suspend_releases_every_pod_and_resume_restarts_the_deadlines():
    observed = serving()
    running = after(observed, decided(observed))
    held = replace(running, job=job(suspend=True))
    leaving = decided(held, 10)
    assert leaving.status.phase == Phase.SUSPENDING
    assert set(leaving.delete) == {HEAD, FEEDERS, TRAINERS}
    idle = decided(after(held, leaving, children=live(*BASE), pods=()), 20)
    assert idle.status.phase == Phase.SUSPENDED
    assert condition(idle, ConditionType.SUSPENDED).status == "True"
    assert (idle.status.start_time, idle.requeue_after_s) == (None, None)
    back = decided(after(replace(held, job=job()), idle, children=live(*BASE), pods=()), 5000)
    assert back.status.phase == Phase.STARTING
    assert back.status.start_time == "2026-01-01T01:23:20Z"
    assert {HEAD, FEEDERS, TRAINERS} <= keys(back)


def test_resumed_job_has_a_startup_deadline_even_after_earlier_restarts():
    observed = serving()
    failed = failed_trainers(after(observed, decided(observed)))
    again = decided(failed, 10)
    assert (again.status.trainers.restarts, again.status.phase) == (1, Phase.DEGRADED)
    held = replace(after(failed, again, children=live(*BASE), pods=()), job=job(suspend=True))
    idle = decided(held, 20)
    assert idle.status.phase == Phase.SUSPENDED
    resumed = replace(after(held, idle), job=job(startupDeadlineSeconds=200), supervisor=None)
    back = decided(resumed, 5000)
    assert (back.status.phase, back.requeue_after_s) == (Phase.STARTING, 200)
    late = decided(after(resumed, back), 5200)
    assert condition(late, ConditionType.FAILED).reason == "StartupDeadlineExceeded"


def test_pods_becoming_ready_in_succession_are_written_together():
    observed = replace(serving(), job=job(**{"feeders.replicas": 8}), supervisor=replace(SUPERVISOR, ready=2))
    written = replace(after(observed, decided(observed)), written_at=T0)
    more = replace(written, supervisor=replace(SUPERVISOR, ready=5))
    soon = decided(more, 0.4)
    assert (soon.status, soon.requeue_after_s) == (written.status, COUNTS_EVERY_S - 0.4)
    assert decided(more, COUNTS_EVERY_S).status.feeders.ready == 5
    assert decided(replace(more, written_at=None), 0.4).status.feeders.ready == 5, "it has just started"


@pytest.mark.parametrize(
    "change", [{"suspend": True}, {"feeders.replicas": 2}, {"trainers.job.failurePolicy": {"maxRestarts": 9}}]
)
def test_changes_other_than_counts_are_written_at_once(change):
    observed = serving()
    written = replace(after(observed, decided(observed)), written_at=T0)
    edited = job(**change)
    edited = edited.model_copy(update={"metadata": edited.metadata.model_copy(update={"generation": 2})})
    made = decided(replace(written, job=edited), 0.1)
    assert made.status.observed_generation == 2
    assert made.status != written.status


def at_start(decision: Decision) -> int:
    return int(
        next(child["data"]["feeders"] for child in decision.apply if "feeders" in child.get("data", {}))
    )


def test_restarted_supervisor_finds_the_current_number_of_feeders():
    wider = replace(serving(), job=job(**{"feeders.replicas": 8}))
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    runs = decided(replace(wider, pods=(pod("head", **ready), pod("feeder"), pod("trainer"))))
    assert (runs.feeders, at_start(runs)) == (8, 8), "the operator may be away when the head starts anew"


def test_policies_are_deleted_when_disabled_and_kept_while_pods_may_exist():
    observed = serving()
    policies = {key for key in BASE if key[0] == "NetworkPolicy"}
    without = decided(replace(observed, job=job(networkPolicy={"mode": "None"})))
    assert set(without.delete) == policies
    assert not keys(without) & policies
    for changes in ({"suspend": True}, {"networkPolicy": {"mode": "Strict"}}):
        made = decided(replace(observed, job=job(**changes)))
        assert keys(made) >= policies, "before and while pods are there"


def test_every_stage_has_an_entry_in_the_table_of_children():
    assert set(WANTED) == set(Stage)
    assert all(ChildPart.BASE in parts for parts in WANTED.values())


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_restarts_never_exceed_the_limit(limit: int):
    observed = replace(
        serving(), job=job(**{"trainers.job.failurePolicy": {"maxRestarts": limit, "backoffSeconds": 0}})
    )
    observed = after(observed, decided(observed))
    for attempt in range(limit + 2):
        made = decided(failed_trainers(observed, attempt=min(attempt, limit)), attempt)
        observed = after(observed, made, children=live(*BASE))
    assert observed.status.trainers.restarts == limit
    assert observed.status.phase == Phase.FAILED


class Cluster(RuleBasedStateMachine):
    """A cluster that does what it is asked to, an operator that may die between any two of its writes, and users."""

    def __init__(self) -> None:
        super().__init__()
        self.spec: dict[str, Any] = {"trainers.job.failurePolicy": {"maxRestarts": 2, "backoffSeconds": 0}}
        self.status = DataLoaderJobStatus()
        self.children: dict[tuple[str, str], dict[str, Any]] = {}
        self.seconds = 0
        self.attempts: set[str] = set()

    def observed(self) -> Observed:
        pods = tuple(
            pod({"mnist-head": "head", "mnist-feeders": "feeder"}.get(name, "trainer"))
            for kind, name in self.children
            if kind in ("Deployment", "Job")
        )
        up = all(self.children.get(key, {}).get("status") for key in (HEAD, FEEDERS))
        supervisor = SUPERVISOR if up else None
        return Observed(
            job=job(**self.spec), status=self.status, children=self.children, pods=pods, supervisor=supervisor
        )

    @rule(writes=st.integers(min_value=0, max_value=15))
    def reconcile(self, writes: int) -> None:
        """The operator reconciles, and dies after so many writes."""
        made = decided(self.observed(), self.seconds)
        acts: list[Any] = [("status", made.status)]
        acts += [("delete", key) for key in made.delete] + [("apply", child) for child in made.apply]
        for act, what in acts[:writes]:
            if act == "status":
                self.status = what
            elif act == "delete":
                self.children[what]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            else:
                key = (what["kind"], what["metadata"]["name"])
                self.children.setdefault(key, {**what, "metadata": dict(what["metadata"]), "status": {}})

    @rule()
    def garbage(self) -> None:
        self.children = {k: v for k, v in self.children.items() if not v["metadata"].get("deletionTimestamp")}

    @rule()
    def everything_starts(self) -> None:
        for key in (HEAD, FEEDERS):
            if key in self.children:
                self.children[key]["status"] = {"readyReplicas": 1}

    @rule(kind=st.sampled_from(["Failed", "Complete"]))
    def trainers_end(self, kind: str) -> None:
        for key, child in self.children.items():
            if key[0] == "Job" and not child["metadata"].get("deletionTimestamp"):
                child["status"] = {"conditions": [{"type": kind, "status": "True"}]}

    @precondition(lambda self: self.children)
    @rule(data=st.data())
    def somebody_deletes_a_child(self, data: st.DataObject) -> None:
        del self.children[data.draw(st.sampled_from(sorted(self.children)))]

    @rule(flag=st.booleans(), seconds=st.integers(min_value=0, max_value=100))
    def a_user_suspends_or_resumes(self, flag: bool, seconds: int) -> None:
        self.spec = {**self.spec, "suspend": flag}
        self.seconds += seconds

    @invariant()
    def one_attempt_at_a_time(self) -> None:
        assert sum(key[0] == "Job" for key in self.children) <= 1
        assert self.status.trainers.restarts <= 2

    @invariant()
    def an_end_is_final(self) -> None:
        ended = {c.type for c in self.status.conditions if c.status == "True"} & {"Complete", "Failed"}
        assert len(ended) <= 1
        if ended:
            assert decided(self.observed(), self.seconds + 10_000).status.phase.value in ended

    def teardown(self) -> None:
        """Left in peace, every job ends up where its spec asks it to be."""
        for _ in range(6):
            self.reconcile(100)
            self.garbage()
            self.everything_starts()
        made = decided(self.observed(), self.seconds)
        assert made.delete == ()
        finished = made.status.phase in (Phase.COMPLETE, Phase.FAILED)
        expected = BASE if finished or self.spec.get("suspend") else BASE | {HEAD, FEEDERS}
        assert {key for key in self.children if key[0] not in ("Job", "ConfigMap")} == expected
        read = {
            map_of(child["spec"]["template"]) for key, child in self.children.items() if key[0] in WORKLOADS
        }
        maps = {name for kind, name in self.children if kind == "ConfigMap"}
        assert maps <= read
        assert finished or maps == read, "trainers that have ended read nothing again"
        if not finished:
            assert made.status.phase == (Phase.SUSPENDED if self.spec.get("suspend") else Phase.RUNNING)


TestCluster = Cluster.TestCase
TestCluster.settings = profile(max_examples=60, stateful_step_count=25, deadline=None)


def test_restart_names_the_evicted_trainer_even_while_it_is_deleted():
    observed = failed_trainers(after(serving(), decided(serving())))
    (crashed,) = observed.pods
    target = {"type": "DisruptionTarget", "status": "True", "message": "drained"}
    gone = pod("trainer", started=False, conditions=[target])
    labels = {**gone["metadata"]["labels"], "dataloading.dev/attempt": "0"}
    leaving = {"name": "mnist-trainers-0-1", "labels": labels, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    made = decided(replace(observed, pods=(crashed, {**gone, "metadata": leaving})))
    assert (
        condition(made, ConditionType.PROGRESSING).message
        == "pod mnist-trainers-0-1: drained; restart not counted as a failure (1st consecutive disruption)"
    )
    earlier = {**leaving, "labels": {**labels, "dataloading.dev/attempt": "7"}}
    made = decided(replace(observed, pods=(crashed, {**gone, "metadata": earlier})))
    assert "CUDA error" in condition(made, ConditionType.PROGRESSING).message
