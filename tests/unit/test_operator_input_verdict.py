"""The verdict on a job's input in its status: column, condition, and how often it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from observed_jobs import SUPERVISOR, T0, after, condition, decided, job, serving
from sim_job import SimJob

from dataloaderjob.api.status import ConditionType, LoaderStatus
from dataloaderjob.core.supervision import Rates
from dataloaderjob_operator.decide import input_verdict
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.decide.supervisor_status import parse

RATES = Rates(batches_per_s=10.0, nbytes_per_s=1e9, stall=0.05, occupancy=0.5)
KIND = ConditionType.INPUT_BOUND


def measured(per_pod: int = 1, **sim: object) -> Observed:
    found = SimJob(**sim).run(90)  # type: ignore[arg-type]
    supervisor = replace(SUPERVISOR, rates=RATES, measures=found)
    return replace(serving(supervisor=supervisor), job=job(**{"feeders.processesPerPod": per_pod}))


def test_a_job_without_a_verdict_says_so():
    made = decided(serving())
    assert condition(made, KIND).status == "Unknown"
    assert condition(made, KIND).reason == "TooFewBatches"
    early = decided(serving(supervisor=replace(SUPERVISOR, rates=RATES)))
    assert early.status.loader.verdict == "unknown"
    assert condition(early, KIND).status == "Unknown"


def test_an_input_bound_job_names_its_limit_and_a_number():
    made = decided(measured())
    assert made.status.loader.verdict == "feeders 6"
    assert made.status.loader.recommended_replicas == 6
    assert made.status.loader.input_bound_percent == "80"
    found = condition(made, KIND)
    assert (found.status, found.reason) == ("True", "Feeders")
    assert found.message.endswith("6 replicas instead of 1 would make it 5.0 times faster")


def test_numbers_are_those_of_pods():
    made = decided(measured(per_pod=4, desired=4, step_s=lambda now: 0.02))
    assert made.status.loader.verdict == "feeders 8"


@pytest.mark.parametrize(("desired", "column"), [(6, "ok"), (12, "ok 6")])
def test_a_job_that_does_not_wait_is_ok(desired, column):
    made = decided(measured(desired=desired))
    assert made.status.loader.verdict == column
    found = condition(made, KIND)
    assert (found.status, found.reason) == ("False", "Trainer")


def test_the_written_verdict_stays_until_it_differs():
    first = measured()
    made = decided(first)
    assert decided(after(first, made), 100).status == made.status
    other = replace(measured(cost_s=0.9), metrics_at=T0)
    early = decided(after(other, made), 30)
    assert early.status == made.status, "the minute is not over"
    late = decided(after(other, made), 61)
    assert late.status.loader.verdict == "feeders 11"
    assert condition(late, KIND).message.startswith("training waits for input for 89% of each step")


def test_noise_in_the_recommended_number_is_not_written():
    written = LoaderStatus(limit="feeders", recommended_replicas=50)
    assert not input_verdict.differs(written, LoaderStatus(limit="feeders", recommended_replicas=53))
    assert input_verdict.differs(written, LoaderStatus(limit="feeders", recommended_replicas=57))
    assert input_verdict.differs(written, LoaderStatus(limit="network", recommended_replicas=50))


def test_a_suspended_job_has_no_verdict():
    first = measured()
    held = replace(after(first, decided(first)), job=job(suspend=True), pods=())
    assert decided(held).status.loader == LoaderStatus()
    assert condition(decided(held), KIND).status == "Unknown"


@pytest.mark.parametrize(
    "measures",
    [7, "x", [], {"seconds": 1e300}, {"seconds": True}, {"ranks": 1, "batches": -5}, {"waiting": "a\x1b[2J"}],
)
def test_measures_from_an_untrusted_supervisor_are_ignored_if_they_are_odd(measures):
    found = parse({"type": "status", "desired": 1, "ready": 1, "measures": measures})
    assert found.measures is None
