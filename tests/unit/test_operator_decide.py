"""What the operator decides about a job, from what it sees of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from manifests import manifest

from dataloaderjob.api import parse_object
from dataloaderjob.api.status import ConditionType, DataLoaderJobStatus, Phase
from dataloaderjob_operator import objects
from dataloaderjob_operator.decide import Decision, decide
from dataloaderjob_operator.objects.trainers import SIDECAR
from dataloaderjob_operator.seen import Seen
from dataloaderjob_operator.stage import WANTED, Part, Stage

SETUP = objects.Setup(version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32)
T0 = datetime(2026, 1, 1, tzinfo=UTC)
HEAD, FEEDERS = ("Deployment", "mnist-head"), ("Deployment", "mnist-feeders")
TRAINERS = ("Job", "mnist-trainers-0")
BASE = {
    ("Secret", "mnist-key"),
    ("ConfigMap", "mnist-settings"),
    ("Service", "mnist-head"),
    ("Service", "mnist-trainers"),
}


def job(**spec: Any):
    changes = {"metadata.uid": "u", "metadata.namespace": "team", "metadata.generation": 1}
    return parse_object(manifest({**changes, **{f"spec.{name}": value for name, value in spec.items()}}))


def pod(role: str, *, attempt: int = 0, started: bool = True, **status: Any) -> dict[str, Any]:
    containers = [{"name": SIDECAR, "started": started}] if role == "trainer" else []
    return {
        "metadata": {"name": f"mnist-{role}-{attempt}", "labels": {"dataloading.dev/role": role}},
        "status": {"initContainerStatuses": containers, **status},
    }


def live(*names: tuple[str, str], **status: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {name: {"metadata": {"name": name[1]}, "status": status} for name in names}


def serving(**more: Any) -> Seen:
    """A job whose parts all serve."""
    children = live(*BASE) | live(HEAD, FEEDERS, readyReplicas=1, replicas=1) | live(TRAINERS, active=1)
    return Seen(job=job(), children=children, pods=(pod("head"), pod("feeder"), pod("trainer")), **more)


def decided(seen: Seen, seconds: float = 0) -> Decision:
    found = decide(seen, SETUP, T0 + timedelta(seconds=seconds))
    assert found is not None
    return found


def after(seen: Seen, decision: Decision, **changes: Any) -> Seen:
    return replace(seen, status=decision.status, **changes)


def condition(decision: Decision, kind: ConditionType):
    return next(c for c in decision.status.conditions if c.type == kind)


def keys(decision: Decision) -> set[tuple[str, str]]:
    return {(child["kind"], child["metadata"]["name"]) for child in decision.apply}


def test_a_job_seen_for_the_first_time_has_all_conditions_and_gets_all_children():
    made = decided(Seen(job=job()))
    assert [c.type for c in made.status.conditions] == [kind.value for kind in ConditionType]
    assert made.status.phase == Phase.STARTING
    assert made.status.observed_generation == 1
    assert keys(made) == BASE | {HEAD, FEEDERS, TRAINERS}
    assert made.delete == ()
    assert made.look_again_s == 900, "the startup deadline"


def test_a_job_of_another_controller_is_left_alone():
    assert decide(Seen(job=job(managedBy="example.com/other")), SETUP, T0) is None


def test_nothing_changes_while_nothing_happens():
    seen = serving()
    first = decided(seen)
    assert first.status.phase == Phase.RUNNING
    assert condition(first, ConditionType.READY).status == "True"
    again = decided(after(seen, first), 500)
    assert again.status == first.status, "not even a time"
    assert again.apply == first.apply


def test_a_part_that_stops_serving_degrades_a_running_job_and_says_why():
    seen = serving()
    running = after(seen, decided(seen))
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
        running, children={**running.children, **live(FEEDERS, replicas=1)}, pods=(sick, pod("trainer"))
    )
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


def test_pods_that_a_quota_refuses_are_told_by_their_deployment():
    seen = serving()
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
    made = decided(replace(seen, children={**seen.children, **live(FEEDERS, **refused)}, pods=()))
    assert condition(made, ConditionType.FEEDERS_READY).message == "exceeded quota"


def test_a_child_that_the_server_refuses_is_told_in_the_servers_words():
    seen = serving()
    made = decided(replace(after(seen, decided(seen)), refused="pods is forbidden: exceeded quota"), 5)
    ready = condition(made, ConditionType.READY)
    assert (ready.status, ready.reason, ready.message) == (
        "False",
        "ChildRefused",
        "pods is forbidden: exceeded quota",
    )
    assert condition(decided(after(seen, made)), ConditionType.READY).status == "True"


def test_when_the_trainers_end_well_head_and_feeders_go_at_once_and_their_logs_stay():
    seen = serving()
    running = after(seen, decided(seen))
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
    assert condition(made, ConditionType.READY).status == "False"
    assert made.look_again_s is None
    gone = decided(after(done, made, children={}, pods=()), 99)
    assert (gone.status.phase, gone.status.completion_time) == (Phase.COMPLETE, made.status.completion_time)


def test_a_finished_job_is_deleted_when_its_time_after_the_end_is_over():
    status = decided(
        replace(serving(), children=live(TRAINERS, conditions=[{"type": "Complete", "status": "True"}]))
    ).status
    seen = Seen(job=job(ttlSecondsAfterFinished=60), status=status)
    assert (decided(seen, 59).delete_job, decided(seen, 59).look_again_s) == (False, 1)
    assert decided(seen, 60).delete_job


def failed_trainers(seen: Seen, attempt: int = 0) -> Seen:
    ended = [{"name": "trainer", "state": {"terminated": {"exitCode": 7, "message": "CUDA error"}}}]
    name = ("Job", f"mnist-trainers-{attempt}")
    return replace(
        seen,
        children={
            **{k: v for k, v in seen.children.items() if k[0] != "Job"},
            **live(name, conditions=[{"type": "Failed", "status": "True"}]),
        },
        pods=(pod("trainer", attempt=attempt, containerStatuses=ended),),
    )


def test_a_trainer_that_fails_restarts_the_whole_group_once_and_only_when_the_old_one_is_gone():
    seen = serving()
    running = after(seen, decided(seen))
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


def test_trainers_that_fail_more_often_than_allowed_fail_the_job_with_the_cause():
    seen = replace(serving(), job=job(backoffLimit=0))
    made = decided(failed_trainers(after(seen, decided(seen))), 10)
    assert made.status.phase == Phase.FAILED
    told = condition(made, ConditionType.FAILED)
    assert told.reason == "BackoffLimitExceeded"
    assert "container trainer: exit code 7: CUDA error (backoffLimit 0)" in told.message
    assert TRAINERS not in made.delete, "its pods have the logs"


def test_a_job_that_does_not_come_up_fails_in_time_and_says_what_it_lacked():
    waiting = {"name": "feeder", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}
    seen = Seen(
        job=job(deadlines={"startupSeconds": 200}), pods=(pod("feeder", containerStatuses=[waiting]),)
    )
    first = decided(seen)
    assert decided(after(seen, first), 199).status.phase == Phase.STARTING
    late = decided(after(seen, first), 200)
    told = condition(late, ConditionType.FAILED)
    assert (late.status.phase, told.reason) == (Phase.FAILED, "StartupDeadlineExceeded")
    assert "ErrImagePull: not found" in told.message


def test_the_startup_deadline_is_met_once_all_served():
    seen = serving()
    running = after(seen, decided(seen))
    lost = replace(running, children={**running.children, **live(HEAD)})
    assert decided(lost, 5000).status.phase == Phase.DEGRADED


def test_a_job_ends_at_its_active_deadline():
    seen = replace(serving(), job=job(deadlines={"activeDeadlineSeconds": 100}))
    first = decided(seen)
    assert first.look_again_s == 100
    assert condition(decided(after(seen, first), 100), ConditionType.FAILED).reason == "DeadlineExceeded"


def test_suspend_releases_every_pod_and_resume_starts_the_deadlines_anew():
    seen = serving()
    running = after(seen, decided(seen))
    held = replace(running, job=job(suspend=True))
    leaving = decided(held, 10)
    assert leaving.status.phase == Phase.SUSPENDING
    assert set(leaving.delete) == {HEAD, FEEDERS, TRAINERS}
    idle = decided(after(held, leaving, children=live(*BASE), pods=()), 20)
    assert idle.status.phase == Phase.SUSPENDED
    assert condition(idle, ConditionType.SUSPENDED).status == "True"
    assert (idle.status.start_time, idle.look_again_s) == (None, None)
    back = decided(after(replace(held, job=job()), idle, children=live(*BASE), pods=()), 5000)
    assert back.status.phase == Phase.STARTING
    assert back.status.start_time == "2026-01-01T01:23:20Z"
    assert {HEAD, FEEDERS, TRAINERS} <= keys(back)


def test_every_stage_says_which_children_it_has():
    assert set(WANTED) == set(Stage)
    assert all(Part.BASE in parts for parts in WANTED.values())


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_restarts_never_exceed_the_limit(limit: int):
    seen = replace(serving(), job=job(backoffLimit=limit))
    seen = after(seen, decided(seen))
    for attempt in range(limit + 2):
        made = decided(failed_trainers(seen, attempt=min(attempt, limit)), attempt)
        seen = after(seen, made, children=live(*BASE))
    assert seen.status.trainers.restarts == limit
    assert seen.status.phase == Phase.FAILED


class Cluster(RuleBasedStateMachine):
    """A cluster that does what it is told, an operator that may die between any two of its writes, and users."""

    def __init__(self) -> None:
        super().__init__()
        self.spec: dict[str, Any] = {"backoffLimit": 2}
        self.status = DataLoaderJobStatus()
        self.children: dict[tuple[str, str], dict[str, Any]] = {}
        self.seconds = 0
        self.attempts: set[str] = set()

    def seen(self) -> Seen:
        pods = tuple(
            pod({"mnist-head": "head", "mnist-feeders": "feeder"}.get(name, "trainer"))
            for kind, name in self.children
            if kind in ("Deployment", "Job")
        )
        return Seen(job=job(**self.spec), status=self.status, children=self.children, pods=pods)

    @rule(writes=st.integers(min_value=0, max_value=12))
    def reconcile(self, writes: int) -> None:
        """The operator looks and acts, and dies after so many writes."""
        made = decided(self.seen(), self.seconds)
        acts: list[Any] = [("status", made.status)]
        acts += [("delete", key) for key in made.delete] + [("apply", child) for child in made.apply]
        for act, what in acts[:writes]:
            if act == "status":
                self.status = what
            elif act == "delete":
                self.children[what]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            else:
                self.children.setdefault(
                    (what["kind"], what["metadata"]["name"]), {"metadata": {}, "status": {}}
                )

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
            assert decided(self.seen(), self.seconds + 10_000).status.phase.value in ended

    def teardown(self) -> None:
        """Left in peace, every job ends up where its spec asks it to be."""
        for _ in range(6):
            self.reconcile(100)
            self.garbage()
            self.everything_starts()
        made = decided(self.seen(), self.seconds)
        assert made.delete == ()
        finished = made.status.phase in (Phase.COMPLETE, Phase.FAILED)
        expected = BASE if finished or self.spec.get("suspend") else BASE | {HEAD, FEEDERS}
        assert {key for key in self.children if key[0] != "Job"} == expected
        if not finished:
            assert made.status.phase == (Phase.SUSPENDED if self.spec.get("suspend") else Phase.RUNNING)


TestCluster = Cluster.TestCase
TestCluster.settings = profile(max_examples=60, stateful_step_count=25, deadline=None)
