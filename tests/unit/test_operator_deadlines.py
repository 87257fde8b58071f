"""Deadlines of a job: whom they end, and whom they leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from looks import ANSWER, FEEDERS, HEAD, TRAINERS, after, condition, decided, job, live, pod, serving

from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob_operator.decide.answers import Answer, Cause
from dataloaderjob_operator.decide.observed import Observed

LATE_S = 901
UNHEARD = [None, Answer(silent="nothing within 5 s"), replace(ANSWER, failure=Cause("UserCodeFailed", "x"))]


@pytest.mark.parametrize("answer", UNHEARD, ids=["not asked", "silent", "a trainer failed"])
def test_a_job_whose_pods_are_up_is_not_ended_for_want_of_a_word_of_its_supervisor(answer):
    observed = serving(answer=answer)
    first = decided(Observed(job=job()))
    late = decided(after(observed, first), LATE_S)
    assert late.status.phase == Phase.STARTING
    assert late.delete == ()
    assert late.requeue_after_s != 0, "time alone changes nothing any more"


def test_a_supervisor_that_has_no_feeders_in_time_ends_the_job():
    first = decided(Observed(job=job()))
    late = decided(after(serving(answer=replace(ANSWER, ready=0)), first), LATE_S)
    assert condition(late, ConditionType.FAILED).reason == "StartupDeadlineExceeded"


def test_the_deadline_says_that_the_supervisor_was_silent():
    first = decided(Observed(job=job()))
    observed = replace(serving(answer=Answer(silent="nothing within 5 s")), pods=(pod("head"), pod("feeder")))
    assert (
        "nothing within 5 s"
        in condition(decided(after(observed, first), LATE_S), ConditionType.FAILED).message
    )


def test_the_deadline_says_what_the_api_server_refused():
    observed = Observed(job=job())
    late = decided(
        replace(after(observed, decided(observed)), refused=".spec.template.spec.nodeSelectr: unknown"),
        LATE_S,
    )
    assert "nodeSelectr" in condition(late, ConditionType.FAILED).message


def test_trainers_that_a_deadline_has_caught_go_with_head_and_feeders():
    observed = replace(serving(), job=job(**{"deadlines.activeDeadlineSeconds": 60}))
    made = decided(after(observed, decided(observed)), 61)
    assert made.status.phase == Phase.FAILED
    assert set(made.delete) == {HEAD, FEEDERS, TRAINERS}


def test_trainers_that_have_ended_stay_for_their_logs():
    observed = serving()
    failed = replace(
        after(observed, decided(observed)),
        job=job(backoffLimit=0),
        children={**observed.children, **live(TRAINERS, conditions=[{"type": "Failed", "status": "True"}])},
    )
    made = decided(failed, 61)
    assert made.status.phase == Phase.FAILED
    assert set(made.delete) == {HEAD, FEEDERS}


def test_a_trainer_that_ended_well_and_whose_pod_is_gone_counts():
    observed = replace(serving(), job=job(**{"trainer.replicas": 2}))
    gone = replace(observed, children={**observed.children, **live(TRAINERS, active=1, succeeded=1)})
    assert decided(gone).status.phase == Phase.RUNNING
    assert decided(observed).status.phase == Phase.STARTING
