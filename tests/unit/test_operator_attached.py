"""Jobs whose trainers other controllers create: phases, conditions and children, from the pods that are attached."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from attached_jobs import (
    STARTED,
    attached_pod,
    decided,
    feeder_replicas,
    following,
    job,
    later,
    serving,
    starting,
    with_spec,
)
from hypothesis import given
from hypothesis import strategies as st
from observed_jobs import FEEDERS, HEAD, SETUP, SUPERVISOR, T0, condition, live

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.sidecar import SIDECAR
from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob_operator import names
from dataloaderjob_operator.decide import attached, events, pod_events
from dataloaderjob_operator.decide.decision import Decision, decide
from dataloaderjob_operator.decide.followed import Followed, FollowedState
from dataloaderjob_operator.decide.observed import Cause, Observed, Trouble

READY, SIDECARS = ConditionType.READY, ConditionType.SIDECARS_READY
NOT_SERVING = live(HEAD, FEEDERS, readyReplicas=0, replicas=1, updatedReplicas=1)
GATED = attached_pod(
    started=False, conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]
)
LEAVING = {
    **attached_pod(),
    "metadata": {**attached_pod()["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"},
}
CRASHED = {"name": SIDECAR, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 3}
NO_SIDECAR = with_spec(attached_pod("bare"), initContainers=[])
STRIPPED = with_spec(attached_pod("stripped", started=False), initContainers=[{"name": SIDECAR}])
FAILS = attached_pod(
    "own", phase="Running", containerStatuses=[{"name": "node", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
)  # fmt: skip


def ready(decision: Decision) -> tuple[str, str]:
    found = condition(decision, READY)
    return found.status, found.reason


@pytest.mark.parametrize(
    ("observed", "phase", "told"),
    [
        pytest.param(starting(), Phase.WAITING, ("False", "NotMade"), id="new"),
        pytest.param(starting(attached_pod(started=False)), Phase.STARTING, ("False", "NotMade"), id="pod-first"),
        pytest.param(serving(), Phase.WAITING, ("True", "Waiting"), id="no-pod"),
        pytest.param(serving(attached_pod()), Phase.SERVING, ("True", "Serving"), id="serving"),
        pytest.param(serving(attached_pod(started=False)), Phase.WAITING, ("True", "Waiting"), id="pod-starts"),
        pytest.param(serving(GATED), Phase.WAITING, ("True", "Waiting"), id="held-back-by-kueue"),
        pytest.param(serving(LEAVING), Phase.WAITING, ("True", "Waiting"), id="pod-being-deleted"),
        pytest.param(serving(attached_pod(phase="Succeeded")), Phase.WAITING, ("True", "Waiting"), id="pod-ended"),
        pytest.param(serving(attached_pod(phase="Failed")), Phase.WAITING, ("True", "Waiting"), id="pod-failed"),
        pytest.param(serving(job=job(idleSeconds=0)), Phase.IDLE, ("True", "Idle"), id="idle-at-once"),
        pytest.param(
            serving(attached_pod(), children=NOT_SERVING),
            Phase.STARTING, ("False", "PodsStart"), id="pod-waits-for-feeders",
        ),
    ],
)  # fmt: skip
def test_phase_follows_from_pods_head_and_feeders(
    observed: Observed, phase: Phase, told: tuple[str, str]
) -> None:
    found = decided(observed)
    assert (found.status.phase, ready(found)) == (phase, told)


def test_attached_job_has_head_feeders_keys_and_no_trainers() -> None:
    made = {(c["kind"], c["metadata"]["name"]) for c in decided(starting()).apply}
    assert {key for key in made if "settings" not in key[1]} == {
        ("Secret", names.key_secret("mnist", "u", SETUP.root_key)), ("Secret", "mnist-attach"),
        ("ConfigMap", "mnist-attach"),
        ("Service", "mnist-head"), ("NetworkPolicy", "mnist-head"), ("NetworkPolicy", "mnist-feeder"), HEAD, FEEDERS,
    }  # fmt: skip
    assert decided(starting()).later == ()


def test_column_counts_attached_pods_and_their_ranks() -> None:
    two = decided(serving(attached_pod("a"), attached_pod("b"))).status.trainers
    assert (two.summary, two.desired, two.active, two.ranks) == ("2 pods, 16 ranks", 2, 2, 16)
    assert decided(serving()).status.trainers.summary == "0 pods"
    one = serving(attached_pod(), supervisor=replace(SUPERVISOR, sidecars=1, ranks=1))
    assert decided(one).status.trainers.summary == "1 pod, 1 rank"


def test_ranks_stay_as_reported_while_the_supervisor_is_silent() -> None:
    observed = serving(attached_pod())
    silent = replace(
        observed, status=decided(observed).status, supervisor=replace(SUPERVISOR, silent="no answer")
    )
    assert decided(silent).status.trainers.ranks == 8


def test_job_without_pods_becomes_idle_after_idle_seconds() -> None:
    observed = serving(job=job(idleSeconds=60, **{"feeders.replicas": 4}))
    before, after = later(observed, 59), later(observed, 60)
    assert (before.status.phase, feeder_replicas(before), before.feeders) == (Phase.WAITING, 4, 4)
    assert (after.status.phase, feeder_replicas(after), after.feeders) == (Phase.IDLE, 0, 0)
    assert before.requeue_after_s == pytest.approx(1.0)
    assert observed.job.spec.feeders.replicas == 4, "the spec stays as it is"
    assert (HEAD[0], HEAD[1]) in {(c["kind"], c["metadata"]["name"]) for c in after.apply}, "the head stays"
    assert after.status.feeders.summary == "0/0"


def test_first_pod_brings_the_feeders_of_an_idle_job_back() -> None:
    idle = serving(job=job(idleSeconds=0))
    status = decided(idle).status
    assert status.phase is Phase.IDLE
    comes = replace(
        idle, status=status, attached=(attached_pod(started=False),), children=NOT_SERVING,
        supervisor=replace(SUPERVISOR, ready=0, desired=0),
    )  # fmt: skip
    woken = decided(comes, 5)
    assert (woken.status.phase, feeder_replicas(woken), woken.feeders) == (Phase.STARTING, 1, 1)
    assert woken.status.serving_time is None, "the startup deadline counts again"
    assert woken.status.trainers.idle_since is None
    up = replace(serving(attached_pod()), status=woken.status)
    assert decided(up, 30).status.phase is Phase.SERVING


def test_pods_gap_shorter_than_idle_seconds_keeps_the_feeders() -> None:
    observed = serving(attached_pod(), job=job(idleSeconds=60))
    gap = replace(observed, attached=(), status=decided(observed).status)
    first = decided(gap, 100)
    assert (first.status.phase, first.status.trainers.idle_since) == (Phase.WAITING, "2026-01-01T00:01:40Z")
    assert decided(replace(gap, status=first.status), 159).status.phase is Phase.WAITING
    assert decided(replace(gap, status=first.status), 160).status.phase is Phase.IDLE


@pytest.mark.parametrize(
    ("pod", "reason", "text"),
    [
        pytest.param(
            attached_pod("bad", initContainerStatuses=[CRASHED]), "ContainerCrashes", "pod bad, container", id="crashes"
        ),
        pytest.param(NO_SIDECAR, "NotInjected", "pod bare: it has the label", id="no-sidecar"),
        pytest.param(STRIPPED, "NotInjected", "lacks restartPolicy Always", id="stripped"),
    ],
)  # fmt: skip
def test_sidecar_that_fails_degrades_the_job_and_is_named(
    pod: dict[str, Any], reason: str, text: str
) -> None:
    served = serving(attached_pod(), status=decided(serving(attached_pod())).status)
    found = decided(replace(served, attached=(attached_pod(), pod)), 1)
    assert found.status.phase is Phase.DEGRADED
    assert (ready(found), text in condition(found, SIDECARS).message) == (("False", reason), True)


def test_pod_that_starts_or_fails_by_itself_does_not_degrade_the_job() -> None:
    served = serving(attached_pod(), status=decided(serving(attached_pod())).status)
    starts = decided(replace(served, attached=(attached_pod(), attached_pod("b", started=False))), 1)
    assert (starts.status.phase, ready(starts)) == (Phase.SERVING, ("True", "Serving"))
    assert condition(starts, SIDECARS).message == "1 of 2 sidecars are listening"
    fails = decided(replace(served, attached=(FAILS,)), 1)
    assert (fails.status.phase, ready(fails)) == (Phase.SERVING, ("True", "Serving"))
    trainers = condition(fails, ConditionType.TRAINERS_READY)
    assert (trainers.status, trainers.reason) == ("False", "ContainerCrashes")


def test_lost_node_of_a_pod_is_named_and_does_not_degrade_the_job() -> None:
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": STARTED}
    silent = {"type": "Ready", "status": "False", "lastTransitionTime": STARTED}
    pods = (
        attached_pod(),
        attached_pod("b", conditions=[placed, {"type": "ContainersReady", "status": "True"}, silent]),
    )
    found = decided(serving(*pods, supervisor=replace(SUPERVISOR, sidecars=1)))
    lost = "1 of 2 sidecars are listening; pod b: its node n does not respond"
    assert (found.status.phase, *ready(found)) == (Phase.SERVING, "True", "Serving")
    assert condition(found, READY).message == f"head and feeders are serving; {lost}"
    assert (condition(found, SIDECARS).reason, condition(found, SIDECARS).message) == (
        "NodeUnreachable",
        lost,
    )
    assert condition(found, ConditionType.TRAINERS_READY).reason == "NodeUnreachable"


def test_volume_that_cannot_be_mounted_is_told_from_the_events_of_a_pod() -> None:
    waits = attached_pod(started=False)
    observed = serving(attached_pod("b"), waits)
    (query,) = decided(observed, 10).event_queries
    assert query.uid == "uid-a"
    trouble = Trouble("a", "", "VolumeNotMounted", 'configmap "mnist-attach" not found')
    found = decided(replace(observed, event_troubles={"uid-a": trouble}), 10)
    assert ready(found) == ("False", "VolumeNotMounted")
    assert "mnist-attach" in condition(found, SIDECARS).message


def test_sidecars_that_never_reach_the_supervisor_are_told_with_the_remedy() -> None:
    observed = serving(attached_pod(), supervisor=replace(SUPERVISOR, sidecars=0))
    early, late = later(observed, 59), later(observed, 61)
    assert early.status.phase is Phase.SERVING
    assert early.requeue_after_s is not None
    assert early.requeue_after_s <= 1.0
    assert (late.status.phase, ready(late)) == (Phase.DEGRADED, ("False", "NotConnected"))
    assert "delete Secret mnist-attach" in condition(late, SIDECARS).message
    assert late.requeue_after_s is not None
    assert late.requeue_after_s <= 10.0


def test_lost_feeders_degrade_a_job_with_pods_and_not_one_without() -> None:
    served = decided(serving(attached_pod())).status
    cause = Cause("FeederFails", "feeder-0: boom")
    lost = replace(SUPERVISOR, ready=0, cause=cause, sidecars=1)
    found = decided(serving(attached_pod(), status=served, supervisor=lost), 1)
    assert (found.status.phase, ready(found)) == (Phase.DEGRADED, ("False", "FeederFails"))
    alone = decided(serving(status=served, supervisor=lost), 1)
    assert (alone.status.phase, ready(alone)) == (Phase.WAITING, ("False", "FeederFails"))


def test_startup_deadline_counts_only_while_pods_wait() -> None:
    children = {"children": NOT_SERVING, "supervisor": replace(SUPERVISOR, ready=0)}
    alone = serving(job=job(idleSeconds=100_000), **children)
    assert later(alone, 50_000).status.phase is Phase.WAITING
    waited = replace(alone, attached=(attached_pod(started=False),))
    status = later(alone, 50_000).status
    first = decided(replace(waited, status=status), 50_000)
    assert first.status.scheduled_time == "2026-01-01T13:53:20Z"
    due = decided(replace(waited, status=first.status), 50_900)
    assert (due.status.phase, due.status.reason) == (Phase.FAILED, "StartupDeadlineExceeded")


def test_suspended_job_has_no_feeders_although_pods_are_attached() -> None:
    observed = serving(attached_pod(), job=_with(job(), suspend=True))
    held = decided(replace(observed, pods=()), 1)
    assert held.status.phase is Phase.SUSPENDED
    assert {c["kind"] for c in held.apply} == {"Secret", "ConfigMap", "Service", "NetworkPolicy"}
    assert (held.status.trainers.idle_since, held.status.trainers.ranks) == (None, 0)


def _with(made: DataLoaderJob, **spec: Any) -> DataLoaderJob:
    return made.model_copy(update={"spec": made.spec.model_copy(update=spec)})


FOLLOWED = [
    (FollowedState.ACTIVE, Phase.SERVING, ""),
    (FollowedState.COMPLETE, Phase.COMPLETE, ""),
    (FollowedState.FAILED, Phase.FAILED, "FollowedFailed"),
    (FollowedState.MISSING, Phase.SERVING, "FollowedMissing"),
    (FollowedState.UNREADABLE, Phase.SERVING, "FollowedNotRead"),
]


def read(state: FollowedState) -> Followed:
    unread = state in (FollowedState.MISSING, FollowedState.UNREADABLE)
    return Followed(state, "the cause", "" if unread else "t")


@pytest.mark.parametrize(("state", "phase", "reason"), FOLLOWED)
def test_end_of_the_followed_object_is_the_end_of_the_job(
    state: FollowedState, phase: Phase, reason: str
) -> None:
    found = decided(serving(attached_pod(), job=following(), followed=read(state)))
    assert (found.status.phase, found.status.reason) == (phase, reason)
    assert (found.follow is None) is (phase in (Phase.COMPLETE, Phase.FAILED))
    if phase in (Phase.COMPLETE, Phase.FAILED):
        kinds = {c["kind"] for c in found.apply}
        assert "Deployment" not in kinds
        assert "the cause" in condition(found, ConditionType(phase.value)).message
        (told,) = [
            c["data"]["sidecar.json"]
            for c in found.apply
            if c["metadata"]["name"] == "mnist-attach" and "data" in c and c["kind"] == "ConfigMap"
        ]
        assert "the cause" in json.loads(told)["ended"], "pods that outlive the job learn of its end"
    elif reason:
        assert "the cause" in condition(found, ConditionType.PROGRESSING).message


@pytest.mark.parametrize("pods", [(), (attached_pod(started=False),)], ids=["waiting", "starting"])
def test_followed_object_that_cannot_be_read_is_told_before_the_start(
    pods: tuple[dict[str, Any], ...],
) -> None:
    found = decided(starting(*pods, job=following(), followed=read(FollowedState.UNREADABLE)))
    progressing = condition(found, ConditionType.PROGRESSING)
    assert (progressing.status, progressing.reason) == ("True", "FollowedNotRead")


def test_followed_object_that_is_deleted_fails_the_job() -> None:
    observed = serving(attached_pod(), job=following(), followed=Followed(FollowedState.ACTIVE, "", "t-1"))
    status = decided(observed).status
    assert status.trainers.followed_uid == "t-1"
    gone = replace(observed, status=status, followed=Followed(FollowedState.MISSING, "does not exist"))
    found = decided(gone, 1).status
    assert (found.phase, found.reason) == (Phase.FAILED, "FollowedDeleted")
    unread = decided(replace(gone, followed=None), 1).status
    assert unread.phase is Phase.SERVING, "a new operator has not read it yet"
    assert decided(replace(gone, status=unread), 2).status.reason == "FollowedDeleted", "it knows of it still"


def test_ended_attached_job_keeps_its_counts_and_goes_by_its_ttl() -> None:
    ending = _with(following(), ttl_seconds_after_finished=30)
    observed = serving(attached_pod(), job=ending, followed=Followed(FollowedState.ACTIVE, "", "t"))
    ran = replace(observed, status=decided(observed).status)
    ended = replace(ran, followed=Followed(FollowedState.COMPLETE, "done", "t"), attached=())
    over = decided(ended, 10)
    assert over.status.trainers.summary == "1 pod, 8 ranks"
    assert not over.delete_job
    assert decided(replace(ended, status=over.status), 41).delete_job


def test_events_tell_of_idleness_return_and_lost_parts() -> None:
    served = decided(serving(attached_pod())).status
    idle = decided(serving(job=job(idleSeconds=0)), 5).status
    assert [e.reason for e in events.events_of(served, idle)] == [events.Reason.IDLE]
    lost = replace(SUPERVISOR, ready=0, cause=Cause("FeederFails", "x"), sidecars=1)
    degraded = decided(serving(attached_pod(), status=served, supervisor=lost), 1).status
    assert [e.reason for e in events.events_of(served, degraded)] == [events.Reason.DEGRADED]
    assert [e.reason for e in events.events_of(degraded, served)] == [events.Reason.RECOVERED]


def owned(name: str, by: str | None = "train") -> pod_events.AttachedPod:
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": by, "uid": f"uid-{by}", "controller": True}
    found = attached_pod(name)
    return pod_events.attached_pod(
        {**found, "metadata": {**found["metadata"], "ownerReferences": [owner] if by else []}}
    )


def test_events_of_pods_name_those_that_came_and_went() -> None:
    before = {"1": owned("a", None), "2": owned("b", None)}
    found = pod_events.of_pods("bert", before, {"2": owned("b", None), "3": owned("c", None)})
    assert [(e.reason, e.message, e.about) for e in found] == [
        (events.Reason.ATTACHED, "pod c has the sidecar and receives batches", None),
        (events.Reason.DETACHED, "pod a is no longer attached", None),
    ]


def test_controller_has_one_event_however_many_of_its_pods_attach() -> None:
    first = pod_events.of_pods("bert", {}, {"1": owned("a"), "2": owned("b"), "3": owned("c", "eval")})
    told = [(e.about.name, e.message) for e in first if e.reason is events.Reason.INJECTED and e.about]
    text = (
        "the pods have the sidecar of DataLoaderJob bert, and receive their batches from that job's feeders"
    )
    assert told == [("train", text), ("eval", text)]
    more = pod_events.of_pods("bert", {"1": owned("a")}, {"1": owned("a"), "2": owned("b")})
    assert [e.reason for e in more] == [events.Reason.ATTACHED]
    (event,) = [e for e in first if e.about and e.about.name == "train"]
    made = events.manifest(event, job().metadata, T0, "host")
    assert (made["involvedObject"]["kind"], made["involvedObject"]["uid"]) == ("Job", "uid-train")
    assert (made["metadata"]["namespace"], made["type"]) == ("team", "Normal")


def test_pod_without_a_sidecar_is_not_reported_as_attached() -> None:
    found = serving(attached_pod(), NO_SIDECAR, STRIPPED)
    assert [pod["metadata"]["name"] for pod in attached.with_sidecar(found)] == ["a"]


PODS = st.lists(
    st.sampled_from([attached_pod(), attached_pod("b", started=False), GATED, LEAVING, NO_SIDECAR, STRIPPED, FAILS]),
    max_size=3,
)  # fmt: skip
STEP = st.tuples(
    PODS, st.booleans(), st.sampled_from([None, *(state for state, _, _ in FOLLOWED)]), st.integers(0, 90)
)


@given(st.lists(STEP, min_size=1, max_size=8), st.sampled_from([0, 60]))
def test_any_life_of_an_attached_job_keeps_its_rules(
    steps: list[tuple[list[dict[str, Any]], bool, FollowedState | None, int]], idle: int
) -> None:
    """Feeders exist whenever a pod is attached; an end is final; the same decision twice changes nothing."""
    spec, status, now, over = following(idleSeconds=idle), None, T0, False
    for pods, up, state, seconds in steps:
        now += timedelta(seconds=seconds)
        followed = None if state is None else read(state)
        parts = {} if up else {"children": NOT_SERVING, "supervisor": replace(SUPERVISOR, ready=0)}
        observed = serving(*pods, job=spec, followed=followed, **parts)
        observed = replace(observed, **({} if status is None else {"status": status}))
        found = decide(observed, SETUP, now)
        assert found is not None
        again = decide(replace(observed, status=found.status), SETUP, now)
        assert again is not None
        assert again.status == found.status
        ended = found.status.phase in (Phase.COMPLETE, Phase.FAILED)
        assert ended or not over, "an end is final"
        over, status = ended, found.status
        here = [p for p in pods if p not in (GATED, LEAVING)]
        if ended:
            assert (found.feeders, feeder_replicas(found)) == (None, None)
        elif here:
            assert (found.feeders, feeder_replicas(found)) == (1, 1)
            assert found.status.phase in (Phase.STARTING, Phase.WAITING, Phase.SERVING, Phase.DEGRADED)
            assert found.status.phase is not Phase.WAITING or condition(found, READY).status == "True"
        else:
            assert found.status.phase in (Phase.WAITING, Phase.IDLE)
            assert found.status.trainers.idle_since is not None
        if found.status.phase is Phase.DEGRADED:
            assert condition(found, READY).status == "False"
