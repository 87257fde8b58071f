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
    SupervisorStatus(silent="no answer within 5 s"),
    replace(SUPERVISOR, failure=Cause("UserCodeFailed", "x")),
]


@pytest.mark.parametrize("supervisor", UNREPORTED, ids=["not asked", "silent", "a trainer failed"])
def test_job_with_running_pods_is_not_ended_for_a_silent_supervisor(supervisor):
    observed = serving(supervisor=supervisor)
    first = decided(Observed(job=job()))
    late = decided(after(observed, first), LATE_S)
    assert late.status.phase == Phase.STARTING
    assert late.delete == ()
    assert late.requeue_after_s != 0, "time alone changes nothing any more"


def test_supervisor_without_feeders_in_time_ends_the_job():
    first = decided(Observed(job=job()))
    late = decided(after(serving(supervisor=replace(SUPERVISOR, ready=0)), first), LATE_S)
    assert condition(late, ConditionType.FAILED).reason == "StartupDeadlineExceeded"


def test_deadline_message_mentions_the_supervisors_silence():
    first = decided(Observed(job=job()))
    observed = replace(
        serving(supervisor=SupervisorStatus(silent="no answer within 5 s")), pods=(pod("head"), pod("feeder"))
    )
    assert (
        "no answer within 5 s"
        in condition(decided(after(observed, first), LATE_S), ConditionType.FAILED).message
    )


def test_deadline_message_names_the_api_servers_refusal():
    observed = Observed(job=job())
    late = decided(
        replace(after(observed, decided(observed)), refused=".spec.template.spec.nodeSelectr: unknown"),
        LATE_S,
    )
    assert "nodeSelectr" in condition(late, ConditionType.FAILED).message


def test_trainers_caught_by_a_deadline_go_with_head_and_feeders():
    observed = replace(serving(), job=job(activeDeadlineSeconds=60))
    made = decided(after(observed, decided(observed)), 61)
    assert made.status.phase == Phase.FAILED
    assert set(made.delete) == {HEAD, FEEDERS, TRAINERS}


def test_ended_trainers_stay_for_their_logs():
    observed = serving()
    failed = replace(
        after(observed, decided(observed)),
        job=job(**{"trainers.job.failurePolicy": {"maxRestarts": 0}}),
        children={**observed.children, **live(TRAINERS, conditions=[{"type": "Failed", "status": "True"}])},
    )
    made = decided(failed, 61)
    assert made.status.phase == Phase.FAILED
    assert set(made.delete) == {HEAD, FEEDERS}


def test_succeeded_trainer_counts_though_its_pod_is_deleted():
    observed = replace(serving(), job=job(**{"trainers.job.replicas": 2}))
    gone = replace(observed, children={**observed.children, **live(TRAINERS, active=1, succeeded=1)})
    assert decided(gone).status.phase == Phase.RUNNING
    assert decided(observed).status.phase == Phase.STARTING
