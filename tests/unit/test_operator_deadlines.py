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
    seen = serving(answer=answer)
    first = decided(Observed(job=job()))
    late = decided(after(seen, first), LATE_S)
    assert late.status.phase == Phase.STARTING
    assert late.delete == ()
    assert late.look_again_s != 0, "time alone changes nothing any more"


def test_a_supervisor_that_has_no_feeders_in_time_ends_the_job():
    first = decided(Observed(job=job()))
    late = decided(after(serving(answer=replace(ANSWER, ready=0)), first), LATE_S)
    assert condition(late, ConditionType.FAILED).reason == "StartupDeadlineExceeded"


def test_the_deadline_says_that_the_supervisor_was_silent():
    first = decided(Observed(job=job()))
    seen = replace(serving(answer=Answer(silent="nothing within 5 s")), pods=(pod("head"), pod("feeder")))
    assert (
        "nothing within 5 s" in condition(decided(after(seen, first), LATE_S), ConditionType.FAILED).message
    )


def test_the_deadline_says_what_the_api_server_refused():
    seen = Observed(job=job())
    late = decided(
        replace(after(seen, decided(seen)), refused=".spec.template.spec.nodeSelectr: unknown"), LATE_S
    )
    assert "nodeSelectr" in condition(late, ConditionType.FAILED).message


def test_trainers_that_a_deadline_has_caught_go_with_head_and_feeders():
    seen = replace(serving(), job=job(**{"deadlines.activeDeadlineSeconds": 60}))
    made = decided(after(seen, decided(seen)), 61)
    assert made.status.phase == Phase.FAILED
    assert set(made.delete) == {HEAD, FEEDERS, TRAINERS}


def test_trainers_that_have_ended_stay_for_their_logs():
    seen = serving()
    failed = replace(
        after(seen, decided(seen)),
        job=job(backoffLimit=0),
        children={**seen.children, **live(TRAINERS, conditions=[{"type": "Failed", "status": "True"}])},
    )
    made = decided(failed, 61)
    assert made.status.phase == Phase.FAILED
    assert set(made.delete) == {HEAD, FEEDERS}


def test_a_trainer_that_ended_well_and_whose_pod_is_gone_counts():
    seen = replace(serving(), job=job(**{"trainer.replicas": 2}))
    gone = replace(seen, children={**seen.children, **live(TRAINERS, active=1, succeeded=1)})
    assert decided(gone).status.phase == Phase.RUNNING
    assert decided(seen).status.phase == Phase.STARTING
