"""The verdict on a live job names its limit, and a number of feeders that removes it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_job import SimJob

from dataloaderjob.core import measures
from dataloaderjob.core.autoscaling import Autoscaler, Situation
from dataloaderjob.core.input_bound import InputVerdict, LiveLimit, judge, predicted
from dataloaderjob.core.measures import Measures

JOBS = [
    pytest.param({"cost_s": 0.5}, LiveLimit.FEEDERS, id="feeders"),
    pytest.param({"cost_s": 0.5, "idle": 0.8}, LiveLimit.STORAGE, id="storage"),
    pytest.param({"desired": 8, "link": 2e6}, LiveLimit.NETWORK, id="network"),
    pytest.param({"desired": 8, "receive_s": 0.5}, LiveLimit.RECEIVER, id="receiver"),
    pytest.param(
        {"desired": 8, "receive_s": 0.2, "receive_queued_s": 0.3}, LiveLimit.RECEIVER, id="receiver-queued"
    ),
    pytest.param({"desired": 2, "slots": 2}, LiveLimit.SLOTS, id="slots"),
    pytest.param({"desired": 6}, LiveLimit.TRAINER, id="trainer"),
]


def judged(**job: object) -> InputVerdict:
    found = judge(SimJob(**job).run(150))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(("job", "limit"), JOBS)
def test_the_limit_of_a_live_job_is_named(job, limit):
    found = judged(**job)
    assert found.limit is limit
    assert found.is_bound is (limit is not LiveLimit.TRAINER)


@pytest.mark.parametrize("start", [1, 2, 4])
@pytest.mark.parametrize("idle", [0.0, 0.8])
def test_the_recommended_feeders_remove_the_waiting(start, idle):
    before = judged(desired=start, idle=idle, spread=0.4)
    after = judged(desired=before.feeders, idle=idle, spread=0.4)
    assert not after.is_bound
    assert after.now == after.feeders == before.feeders
    assert before.gain == pytest.approx(5 / start, rel=0.05)


@pytest.mark.parametrize(
    "job", [{"desired": 8, "link": 2e6}, {"desired": 8, "receive_s": 0.5}, {"desired": 2, "slots": 2}]
)
def test_no_more_feeders_are_recommended_if_they_do_not_help(job):
    found = judged(**job)
    assert found.feeders <= job["desired"]
    assert found.gain == 1.0


@pytest.mark.parametrize(("job", "limit"), JOBS)
def test_the_rate_with_twice_the_feeders_is_predicted(job, limit):
    found = SimJob(**job).run(150)
    then = SimJob(**{**job, "desired": 2 * found.feeders}).run(150)
    assert predicted(found, 2 * found.feeders) == pytest.approx(then.rate, rel=0.05)


def test_loop_that_does_nothing_gets_no_number_of_feeders():
    found = judge(
        dataclasses.replace(
            SimJob(cost_s=0.5).run(100), step_s=1e-7, calm_step_s=0.0, receiving=1e-6, nbytes=1
        )
    )
    assert found.is_endless
    assert found.column(1024, 1) == "feeders"
    assert "1024" not in found.sentence(1024, 1, "replicas")
    assert "does almost nothing between two batches" in found.sentence()


def test_too_many_feeders_are_called_so():
    found = judged(desired=16)
    assert (found.word, found.feeders) == ("ok", 6)
    assert "6 feeders instead of 16 would suffice" in found.sentence()


def test_busy_connections_beside_busier_feeders_are_not_the_limit():
    found = SimJob(cost_s=0.5).run(100)
    assert judge(dataclasses.replace(found, sending=0.6)).limit is LiveLimit.FEEDERS


def test_idle_feeders_of_a_waiting_job_are_no_reason_for_more():
    found = judge(dataclasses.replace(SimJob(cost_s=0.5).run(100), busy=0.2))
    assert found.limit is LiveLimit.ORDER
    assert found.feeders == 1
    assert "more of them would not help" in found.sentence()


def test_waiting_on_a_machine_without_a_free_cpu_is_not_called_storage():
    found = dataclasses.replace(SimJob(cost_s=0.5, idle=0.7).run(100), queued_s=0.35)
    assert judge(found).limit is LiveLimit.FEEDERS


@pytest.mark.parametrize(("feeders", "limit"), [(2, LiveLimit.SLOTS), (1, LiveLimit.FEEDERS)])
def test_slots_that_all_have_a_feeder_are_the_limit_even_if_it_has_gaps(feeders, limit):
    found = SimJob(desired=2, slots=2).run(100)
    found = dataclasses.replace(found, feeders=feeders, wait_s=1.4 * found.wait_s, busy=0.75)
    assert judge(found).limit is limit


def test_a_launch_is_not_taken_for_a_step_once_the_step_is_known():
    job = SimJob(cost_s=0.05, step_s=lambda now: 0.1, launch_s=0.001, desired=2)
    job.run(60)
    job.cost_s = 1.0
    found = judge(job.run(100))
    assert found.limit is LiveLimit.FEEDERS
    assert found.feeders == pytest.approx(1.0 / 0.1 / 0.85, abs=1)


def test_too_few_batches_give_no_verdict():
    assert judge(None) is None
    assert judge(dataclasses.replace(SimJob().run(100), wall_s=0.0)) is None


def test_the_sentence_names_waiting_limit_number_and_gain():
    assert judged(cost_s=0.5).sentence() == (
        "training waits for input for 80% of each step; the feeders' CPUs are the limit; 6 feeders instead of 1 would "
        "make it 5.0 times faster"
    )
    assert (
        judged(cost_s=0.5)
        .sentence(3, 1, "replicas")
        .endswith("3 replicas instead of 1 would make it 5.0 times faster")
    )


def test_the_column_is_one_word_and_a_number_that_differs():
    assert judged(cost_s=0.5).column(6, 1) == "feeders 6"
    assert judged(desired=6).column(6, 6) == "ok"


@given(
    st.builds(
        Measures,
        **{
            field.name: st.booleans()
            if field.type in ("bool", bool)
            else st.integers(0, 10**15)
            if field.type in ("int", int)
            else st.floats(0, 1e15) | st.sampled_from([0.0, 5e-324, 1e15])
            for field in dataclasses.fields(Measures)
        },
    )
)
def test_any_measures_that_a_supervisor_may_send_are_judged(found):
    parsed = measures.parse(found.as_dict())
    verdict = judge(parsed)
    Autoscaler().step(0.0, Situation(desired=1, ready=1, measures=parsed))
    if verdict is not None:
        assert verdict.feeders >= 1
        assert verdict.gain >= 1.0
        assert len(verdict.sentence()) <= 512
        assert len(verdict.column(verdict.feeders, 10**15 - 1)) <= 32
