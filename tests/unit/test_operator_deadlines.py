"""Deadlines of a job: whom they end, and whom they leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from observed_jobs import (
    FEEDERS,
    HEAD,
    SUPERVISOR,
    TRAINERS,
    after,
    condition,
    decided,
    job,
    live,
    pod,
    serving,
)

from dataloaderjob.api.status import ConditionType, Phase
from dataloaderjob_operator.decide.observed import Cause, Observed, SupervisorStatus

LATE_S = 901
UNREPORTED = [
    None,
    SupervisorStatus(silent="nothing within 5 s"),
    replace(SUPERVISOR, failure=Cause("UserCodeFailed", "x")),
]


@pytest.mark.parametrize("supervisor", UNREPORTED, ids=["not asked", "silent", "a trainer failed"])
def test_a_job_whose_pods_are_up_is_not_ended_for_want_of_a_word_of_its_supervisor(supervisor):
    observed = serving(supervisor=supervisor)
    first = decided(Observed(job=job()))
    late = decided(after(observed, first), LATE_S)
    assert late.status.phase == Phase.STARTING
    assert late.delete == ()
    assert late.requeue_after_s != 0, "time alone changes nothing any more"


def test_a_supervisor_that_has_no_feeders_in_time_ends_the_job():
    first = decided(Observed(job=job()))
    late = decided(after(serving(supervisor=replace(SUPERVISOR, ready=0)), first), LATE_S)
    assert condition(late, ConditionType.FAILED).reason == "StartupDeadlineExceeded"


def test_the_deadline_s_message_names_the_silence_of_the_supervisor():
    first = decided(Observed(job=job()))
    observed = replace(
        serving(supervisor=SupervisorStatus(silent="nothing within 5 s")), pods=(pod("head"), pod("feeder"))
    )
    assert (
        "nothing within 5 s"
        in condition(decided(after(observed, first), LATE_S), ConditionType.FAILED).message
    )


def test_the_deadline_s_message_names_what_the_api_server_refused():
    observed = Observed(job=job())
    late = decided(
        replace(after(observed, decided(observed)), refused=".spec.template.spec.nodeSelectr: unknown"),
        LATE_S,
    )
    assert "nodeSelectr" in condition(late, ConditionType.FAILED).message


def test_trainers_that_a_deadline_has_caught_go_with_head_and_feeders():
    observed = replace(serving(), job=job(activeDeadlineSeconds=60))
    made = decided(after(observed, decided(observed)), 61)
    assert made.status.phase == Phase.FAILED
    assert set(made.delete) == {HEAD, FEEDERS, TRAINERS}


def test_trainers_that_have_ended_stay_for_their_logs():
    observed = serving()
    failed = replace(
        after(observed, decided(observed)),
        job=job(**{"trainers.job.failurePolicy": {"maxRestarts": 0}}),
        children={**observed.children, **live(TRAINERS, conditions=[{"type": "Failed", "status": "True"}])},
    )
    made = decided(failed, 61)
    assert made.status.phase == Phase.FAILED
    assert set(made.delete) == {HEAD, FEEDERS}


def test_a_trainer_that_ended_well_and_whose_pod_is_gone_counts():
    observed = replace(serving(), job=job(**{"trainers.job.replicas": 2}))
    gone = replace(observed, children={**observed.children, **live(TRAINERS, active=1, succeeded=1)})
    assert decided(gone).status.phase == Phase.RUNNING
    assert decided(observed).status.phase == Phase.STARTING
