"""Pods on nodes that are lost: they are named, and hold nothing up for longer than a minute or so."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from job_lives import Life, gone_by, of_attempt, target
from observed_jobs import SETUP, T0, after, condition, decided, job, keys, live, pod, serving

from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob_operator import objects
from dataloaderjob_operator.decide import restarts
from dataloaderjob_operator.decide.observed import Observed, Pod, show_time
from dataloaderjob_operator.decide.pod_troubles import trouble_of

RUNS = {"containerStatuses": [{"name": "trainer", "state": {"running": {}}, "ready": True}]}


def on_lost_node(found: Pod, seconds: float = 0.0) -> dict[str, Any]:
    """As Kubernetes leaves a pod whose node answers no more."""
    since = show_time(T0 + timedelta(seconds=seconds))
    given_up = [
        {"type": "Ready", "status": "False", "lastTransitionTime": since},
        {"type": "ContainersReady", "status": "True"},
        *found["status"].get("conditions", []),
    ]
    return {**found, "status": {**found["status"], **RUNS, "conditions": given_up}}


def lost(life: Life, *pods: Pod) -> Observed:
    """The trainers' Job has failed and is being deleted; these of its pods are left."""
    observed = life.observed(pods)
    old = live(("Job", "mnist-trainers-0"))
    metadata = {"deletionTimestamp": show_time(T0), "labels": {"dataloading.dev/attempt": "0"}}
    old["Job", "mnist-trainers-0"]["metadata"] |= metadata
    return replace(observed, children={**observed.children, **old})


def test_pod_on_an_unreachable_node_is_named_though_containers_run() -> None:
    observed = replace(serving(), pods=(pod("head"), pod("feeder"), on_lost_node(of_attempt(0, 3))))
    made = decided(after(observed, decided(serving())))
    ready = condition(made, ConditionType.READY)
    assert (ready.status, ready.reason) == ("False", "NodeUnreachable")
    assert ready.message == "pod mnist-trainers-0-3: its node node-3 does not respond"
    assert (made.status.phase, made.status.trainers.summary) == (Phase.DEGRADED, "0/1")


def test_pod_unready_for_its_own_reasons_is_not_on_a_lost_node() -> None:
    own = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
    gates = {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}
    ready = {"type": "ContainersReady", "status": "True"}
    assert trouble_of(of_attempt(0, **RUNS, conditions=[own])) is None
    assert trouble_of(of_attempt(0, **RUNS, conditions=[gates, ready])) is None


@pytest.mark.parametrize("silent", [True, False], ids=["its node is silent", "something holds it"])
def test_pod_stuck_in_deletion_delays_the_next_attempt_for_a_bounded_time(silent: bool) -> None:
    life = Life()
    victim = gone_by(of_attempt(0, 0, **target("DeletionByTaintManager"), **RUNS), 30)
    victim = on_lost_node(victim) if silent else victim
    life.fails(victim)
    assert life.attempt == 1
    bound_s = 30 if silent else 30 + restarts.STUCK_S
    life.now = bound_s - 1
    waits = life.decide(lost(life, victim))
    assert not any(kind == "Job" for kind, _ in keys(waits))
    assert waits.requeue_after_s == 1
    assert "pod mnist-trainers-0-0" in condition(waits, ConditionType.READY).message
    life.now = bound_s
    made = life.decide(lost(life, victim))
    assert ("Job", "mnist-trainers-1") in keys(made), "it has another name"


def test_long_grace_period_is_ignored_on_an_unreachable_node() -> None:
    life = Life()
    victim = on_lost_node(gone_by(of_attempt(0, 0, **target("DeletionByTaintManager")), 3600, 3600))
    life.fails(victim)
    life.now = 29
    assert not any(kind == "Job" for kind, _ in keys(decided(lost(life, victim), life.now)))
    life.now = 30
    assert ("Job", "mnist-trainers-1") in keys(decided(lost(life, victim), life.now))


def test_terminating_pods_of_the_last_attempt_delay_the_next_one() -> None:
    life = Life()
    victim = on_lost_node(gone_by(of_attempt(0, 0, **target("DeletionByTaintManager")), 30))
    ends = gone_by(of_attempt(0, 1), 600, 600)
    life.fails(victim, ends)
    life.now = 500
    assert not any(kind == "Job" for kind, _ in keys(decided(lost(life, victim, ends), life.now)))
    assert any(kind == "Job" for kind, _ in keys(decided(lost(life, victim), life.now)))


def test_pod_left_behind_is_named_while_the_next_attempt_runs() -> None:
    life = Life()
    victim = on_lost_node(gone_by(of_attempt(0, 0, **target("DeletionByTaintManager")), 30))
    life.fails(victim)
    life.now = 300
    observed = lost(life, victim, of_attempt(1, 1, **RUNS))
    runs = replace(observed, children={**observed.children, **live(("Job", "mnist-trainers-1"), active=1)})
    made = life.decide(runs)
    assert (made.status.phase, condition(made, ConditionType.READY).status) == (Phase.RUNNING, "True")
    moving = condition(made, ConditionType.PROGRESSING)
    assert (moving.status, moving.reason) == ("False", "PodsStuck")
    assert "pod mnist-trainers-0-0 on node node-0, which does not respond" in moving.message
    assert "node.kubernetes.io/out-of-service" in moving.message


def test_job_suspends_despite_a_stuck_pod_and_resumes_under_a_new_name() -> None:
    life = Life()
    victim = on_lost_node(gone_by(of_attempt(0, 0), 30))
    life.job = job(suspend=True)
    held = replace(lost(life, victim), pods=(victim,))
    life.now = 29
    assert life.decide(held).status.phase == Phase.SUSPENDING
    life.now = 30
    idle = life.decide(held)
    assert idle.status.phase == Phase.SUSPENDED
    assert "pod mnist-trainers-0-0 on node node-0" in condition(idle, ConditionType.SUSPENDED).message
    life.job = job()
    back = life.decide(lost(life, victim))
    assert (life.attempt, back.status.trainers.failures) == (1, 0)
    assert ("Job", "mnist-trainers-1") in keys(life.decide(lost(life, victim)))


def test_stuck_trainer_pod_and_not_a_stuck_feeder_forces_a_new_name() -> None:
    life = Life()
    feeder, trainer = gone_by(pod("feeder"), 0), gone_by(of_attempt(0, 0), 0)
    life.now = restarts.STUCK_S
    made = life.decide(lost(life, feeder, trainer))
    assert life.attempt == 1
    assert "pod mnist-trainers-0-0 on" in condition(made, ConditionType.PROGRESSING).message


def test_trainers_job_stuck_without_pods_is_named_and_given_up() -> None:
    life = Life()
    assert life.decide(lost(life)).requeue_after_s == restarts.STUCK_S
    life.now = restarts.STUCK_S
    made = life.decide(lost(life))
    assert life.attempt == 1
    assert (
        "Job mnist-trainers-0 has no pods, but has been terminating"
        in condition(made, ConditionType.PROGRESSING).message
    )


def tolerations(**spec: Any) -> list[list[dict[str, Any]]]:
    made = job(**spec)
    children = [*objects.feeding(made, SETUP), *objects.training(made, SETUP, 0)]
    return [c["spec"]["template"]["spec"]["tolerations"] for c in children if "template" in c.get("spec", {})]


def test_all_pods_of_a_job_leave_a_lost_node_after_half_a_minute() -> None:
    found = tolerations(**{"trainers.job.template.spec.tolerations": [{"operator": "Exists"}]})
    assert len(found) == 3
    for pod_s in found:
        assert {t["key"]: t["tolerationSeconds"] for t in pod_s[:2]} == {
            "node.kubernetes.io/not-ready": 30,
            "node.kubernetes.io/unreachable": 30,
        }
    assert found[-1][2:] == [{"operator": "Exists"}], "the first that fits counts"


def test_user_may_set_how_long_pods_stay_on_a_lost_node() -> None:
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 3600}
    *_, found = tolerations(**{"trainers.job.template.spec.tolerations": [own]})
    assert [t["key"] for t in found] == ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]
    assert found[1] == own
