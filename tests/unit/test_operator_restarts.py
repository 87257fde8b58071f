"""When trainers that failed are started anew: what counts, how long the pauses are, what is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_lives import BUSY, Life, ended, gone_by, of_attempt, target
from observed_jobs import T0, after, condition, decided, job, keys, serving

from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob_operator.decide import restarts
from dataloaderjob_operator.decide.observed import show_time

DISRUPTIONS = {
    "eviction": target("EvictionByEvictionAPI"),
    "preemption": target("PreemptionByScheduler"),
    "taint": target("DeletionByTaintManager"),
    "node deleted": target("DeletionByPodGC"),
    "node pressure": {**target("TerminationByKubelet"), "phase": "Failed", "reason": "Evicted"},
    "evicted": {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
    "preempted by the kubelet": {"phase": "Failed", "reason": "Preempting", "message": "for a static pod"},
    "node shutdown": {"phase": "Failed", "reason": "Terminated", "message": "imminent node shutdown"},
    "refused by its node": {"phase": "Failed", "reason": "OutOfcpu", "message": "Node has no cpu"},
}


@pytest.mark.parametrize("disruption", list(DISRUPTIONS))
def test_disruption_starts_a_new_attempt_at_once_and_does_not_count(disruption: str) -> None:
    life = Life(maxRestarts=0)
    victim, peer = of_attempt(0, 1, **DISRUPTIONS[disruption]), of_attempt(0, 0, **ended(134, 5))
    made = life.fails(gone_by(victim, 30), peer)
    assert (made.status.trainers.restarts, made.status.phase) == (1, Phase.DEGRADED)
    assert (made.status.trainers.failures, made.status.trainers.disruptions) == (0, 1)
    moving = condition(made, ConditionType.PROGRESSING)
    assert (moving.status, moving.reason) == ("True", "Disrupted")
    assert "pod mnist-trainers-0-1" in moving.message
    assert moving.message.endswith("; restart not counted as a failure (1st consecutive disruption)")
    assert life.starts_after() == 0.0


def test_disruptions_count_if_the_policy_requires_it() -> None:
    life = Life(maxRestarts=0, ignoreDisruptions=False)
    assert life.fails(of_attempt(0, **DISRUPTIONS["evicted"])).status.phase == Phase.FAILED


@pytest.mark.parametrize(
    "message",
    [
        'Usage of EmptyDir volume "dataloaderjob-run" exceeds the limit "10Gi". ',
        "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
        'Container trainer exceeded its local ephemeral storage limit "1Gi". ',
    ],
)
def test_self_inflicted_eviction_counts(message: str) -> None:
    life = Life()
    made = life.fails(of_attempt(0, phase="Failed", reason="Evicted", message=message))
    assert (made.status.trainers.failures, made.status.trainers.disruptions) == (1, 0)


def test_out_of_memory_container_is_not_a_disruption() -> None:
    made = Life().fails(of_attempt(0, **ended(137, reason="OOMKilled")))
    assert made.status.trainers.failures == 1


def test_deleted_trainer_pod_counts_as_a_disruption() -> None:
    life = Life(maxRestarts=0)
    made = life.fails(gone_by(of_attempt(0, **ended(143)), 20))
    assert made.status.trainers.disruptions == 1
    assert "a trainer pod was deleted" in condition(made, ConditionType.PROGRESSING).message
    vanished = Life(maxRestarts=0)
    made = vanished.decide(vanished.observed((), failed=1, conditions=[{"type": "Failed", "status": "True"}]))
    assert made.status.trainers.disruptions == 1


def test_failure_is_not_judged_before_the_pods_are_known() -> None:
    life = Life()
    running = of_attempt(0)
    failed = {"type": "FailureTarget", "status": "True", "lastTransitionTime": show_time(T0)}
    early = life.decide(life.observed((running,), conditions=[failed]))
    assert (early.status.trainers.restarts, early.requeue_after_s) == (0, restarts.SETTLE_S)
    assert early.delete == ()
    told = life.decide(life.observed((of_attempt(0, **ended(7)),), conditions=[failed]))
    assert told.status.trainers.failures == 1
    silent = Life()
    silent.decide(silent.observed((running,), conditions=[failed]))
    silent.now = restarts.SETTLE_S
    assert silent.decide(silent.observed((running,), conditions=[failed])).status.trainers.failures == 1


def test_the_pauses_between_attempts_double_up_to_five_minutes() -> None:
    life, pauses = Life(maxRestarts=9, backoffSeconds=10), []
    for _ in range(8):
        life.fails()
        pauses.append(life.starts_after())
        life.runs(5)
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]
    assert restarts.pause(10.0, 10**9) == restarts.LONGEST_PAUSE_S


def test_pause_is_reported_and_survives_an_operator_restart() -> None:
    life = Life(backoffSeconds=60)
    made = life.fails()
    assert made.status.trainers.next_start == "2026-01-01T00:01:00Z"
    assert condition(made, ConditionType.PROGRESSING).message.endswith("1 of 3, at 2026-01-01T00:01:00Z")
    life.now = 59
    later = life.decide(life.observed(()))
    assert condition(later, ConditionType.PROGRESSING) == condition(made, ConditionType.PROGRESSING)
    assert not any(kind == "Job" for kind, _ in keys(later))
    assert later.requeue_after_s == 1
    assert later.status.phase == Phase.DEGRADED


def test_job_disrupted_too_often_backs_off_and_finally_fails() -> None:
    life, pauses = Life(maxRestarts=0), []
    for _ in range(restarts.MAX_DISRUPTIONS):
        life.fails(of_attempt(life.attempt, **DISRUPTIONS["preemption"]))
        pauses.append(life.starts_after())
        life.runs(5)
    made = life.fails(of_attempt(life.attempt, **DISRUPTIONS["preemption"]))
    found = condition(made, ConditionType.FAILED)
    assert (made.status.phase, found.reason) == (Phase.FAILED, "DisruptedTooOften")
    assert f"{restarts.MAX_DISRUPTIONS} consecutive disruptions" in found.message
    assert pauses[:4] == [0, 10, 20, 40]
    assert sum(pauses) > 3 * 3600


def test_restarts_are_forgotten_after_ten_minutes_with_batches() -> None:
    life = Life(maxRestarts=1)
    life.fails()
    life.starts_after()
    life.supervisor = BUSY
    assert life.runs(restarts.FORGETS_AFTER_S - 1).status.trainers.failures == 1
    made = life.decide(life.observed((of_attempt(1),), active=1))
    assert 0 < (made.requeue_after_s or 0) <= restarts.AGAIN_S
    life.now += 1
    assert life.decide(life.observed((of_attempt(1),), active=1)).status.trainers.failures == 0
    assert life.attempt == 1, "names are not used again"
    assert life.fails().status.phase == Phase.DEGRADED, "one more is allowed"


def test_restarts_are_not_forgotten_while_no_batch_is_taken() -> None:
    life = Life(maxRestarts=1)
    life.fails()
    life.starts_after()
    assert life.runs(10_000).status.trainers.failures == 1
    assert life.fails().status.phase == Phase.FAILED


RULES = [{"onExitCodes": [42, 43], "action": "FailJob"}, {"onExitCodes": [75], "action": "Ignore"}]


def test_an_exit_code_may_fail_the_job_at_once() -> None:
    made = Life(rules=RULES).fails(of_attempt(0, 0, **ended(43, 1)), of_attempt(0, 1, **ended(1, 4)))
    found = condition(made, ConditionType.FAILED)
    assert found.reason == "FailurePolicy"
    assert found.message.endswith("(failurePolicy.rules[0]: exit code 43)")


def test_exit_code_may_be_exempt_from_counting() -> None:
    made = Life(maxRestarts=0, rules=RULES).fails(of_attempt(0, **ended(75)))
    assert made.status.trainers.disruptions == 1
    assert "rules[1]: exit code 75" in condition(made, ConditionType.PROGRESSING).message


def test_exit_code_rule_applies_to_the_first_trainer_that_failed() -> None:
    made = Life(rules=RULES).fails(of_attempt(0, 0, **ended(1, 1)), of_attempt(0, 1, **ended(42, 9)))
    assert made.status.trainers.failures == 1
    killed = gone_by(of_attempt(0, 1, **ended(42, 0)), 30)
    made = Life(rules=RULES).fails(of_attempt(0, 0, **ended(1, 1)), killed)
    assert made.status.trainers.failures == 1


def test_disruption_takes_precedence_over_exit_codes_it_caused() -> None:
    victim = gone_by(of_attempt(0, 1, **DISRUPTIONS["eviction"]), 30)
    made = Life(rules=RULES).fails(victim, of_attempt(0, 0, **ended(42)))
    assert made.status.trainers.disruptions == 1


def test_suspending_ends_the_pause() -> None:
    life = Life(backoffSeconds=300)
    life.fails()
    life.job = job(suspend=True)
    held = replace(life.observed(()), pods=())
    assert life.decide(held).status.trainers.next_start is None
    life.job = job()
    assert life.starts_after() == 0.0


def test_running_job_requests_no_reconcile_for_restarts() -> None:
    observed = serving()
    assert decided(after(observed, decided(observed))).requeue_after_s is None
