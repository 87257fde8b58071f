"""Sums that sidecars and feeders report become the measures of the last minute."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_job import SimJob

from dataloaderjob.core import costs, measures
from dataloaderjob.core.costs import BatchCost, CostClock, FeederCosts, QueuedTime
from dataloaderjob.core.measures import Measures, MeasuresWindow


def test_a_waiting_job_is_measured():
    found = SimJob(cost_s=0.5, step_s=lambda now: 0.1, spread=0.3, idle=0.6).run(80)
    assert found is not None
    assert found.step_s == pytest.approx(0.1, rel=0.01)
    assert found.wait_s == pytest.approx(0.4, rel=0.01)
    assert found.waiting == pytest.approx(0.8, rel=0.01)
    assert found.rate == pytest.approx(2.0, rel=0.01)
    assert found.wall_s == pytest.approx(0.5, rel=0.01)
    assert found.cpu_s == pytest.approx(0.2, rel=0.01)
    assert found.spread == pytest.approx(0.3, rel=0.01)
    assert found.busy == pytest.approx(1.0, rel=0.02)
    assert (found.nbytes, found.feeders, found.ranks) == (pytest.approx(1_000_000, rel=0.01), 1, 1)


def test_few_batches_measure_nothing():
    job = SimJob(cost_s=1.0)
    assert job.run(measures.FIRST + measures.ENOUGH // 2) is None
    assert job.run(60) is not None


def test_slow_steps_widen_the_window():
    found = SimJob(cost_s=0.5, step_s=lambda now: 6.0).run(600)
    assert found is not None
    assert found.batches >= measures.ENOUGH
    assert found.seconds > measures.WINDOW_S


def test_measures_follow_a_change_within_a_minute():
    job = SimJob(cost_s=0.1, step_s=lambda now: 0.1 if now < 200 else 0.4, desired=4)
    job.run(200)
    found = job.run(70)
    assert found is not None
    assert found.step_s == pytest.approx(0.4, rel=0.01)


def test_a_checkpoint_is_not_a_step():
    found = SimJob(cost_s=0.1, desired=4, paused=lambda now: 100 < now < 130).run(150)
    assert found is not None
    assert found.step_s == pytest.approx(0.1, rel=0.01)


def test_the_longest_step_without_waiting_is_remembered():
    job = SimJob(cost_s=0.1, step_s=lambda now: 0.2, launch_s=0.02, desired=4)
    job.run(60)
    job.cost_s = 4.0
    found = job.run(120)
    assert found is not None
    assert found.step_s == pytest.approx(0.02, rel=0.01)
    assert found.calm_step_s == pytest.approx(0.2, rel=0.01)
    assert found.queues_kernels


def test_an_evaluation_is_not_steady():
    job = SimJob(cost_s=0.1, desired=4, evaluates=lambda now: now > 100)
    assert job.run(100).is_steady
    assert not job.run(10).is_steady


def test_a_loop_that_has_ended_does_not_make_its_feeders_look_idle():
    job = SimJob(cost_s=0.5, has_ended=lambda now: now > 30)
    before = job.run(30)
    after = job.run(20)
    assert (after.busy, after.waiting, after.rate) == pytest.approx(
        (before.busy, before.waiting, before.rate), rel=0.05
    )
    assert before.busy > 0.95


@pytest.mark.parametrize("start_s", [5.0, 6.0])
def test_feeders_that_have_reported_a_part_of_their_time_do_not_look_idle(start_s):
    job, found = SimJob(cost_s=0.1, start_s=lambda number: start_s, report_s=2), list[Measures]()
    while job.now < 14:
        job.second()
        found += [one for one in [job.window.measures()] if one is not None and one.wall_s]
    assert len(found) > 3
    assert min(one.busy for one in found) > 0.9


def test_a_receiver_without_a_cpu_is_receiving():
    found = SimJob(desired=8, receive_s=0.2, receive_queued_s=0.3).run(100)
    assert found is not None
    assert found.receiving == pytest.approx(1.0, rel=0.02)


def test_a_restarted_sidecar_shifts_nothing():
    job = SimJob(cost_s=0.5)
    before = job.run(80)
    job._sums = {}
    after = job.run(60)
    assert after.rate == pytest.approx(before.rate, rel=0.05)
    assert after.wait_s == pytest.approx(before.wait_s, rel=0.05)


def test_parts_of_a_batch_cost_what_the_batch_costs():
    job = SimJob(cost_s=0.2, desired=4)
    work = job._work

    def in_four(ready):
        work(ready)
        job._costs = {
            **job._costs, "built": job.taken * 4, "wall_ns": job.taken * 0.2e9, "samples_ns": job.taken * 0.2e9
        }  # fmt: skip

    job._work = in_four
    assert job.run(90).wall_s == pytest.approx(0.2, rel=0.05)


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in dataclasses.fields(Measures)]) | st.text(),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()),
    )
    | st.none()
    | st.text()
)
def test_any_report_of_measures_is_parsed_or_ignored(found):
    made = measures.parse(found)
    assert made is None or all(value >= 0 for value in dataclasses.astuple(made))


def test_measures_survive_their_journey():
    found = SimJob(cost_s=0.5, slots=3).run(80)
    assert measures.parse(found.as_dict()) == dataclasses.replace(
        found, **{n: round(v, 9) for n, v in dataclasses.asdict(found).items() if isinstance(v, float)}
    )


@given(st.lists(st.integers(0, 2**40), min_size=5, max_size=5), st.binary(max_size=20))
def test_a_batchs_cost_survives_its_journey(values, before):
    cost = BatchCost(*values)
    assert BatchCost.unpack(before + cost.pack(), len(before)) == cost
    assert BatchCost.unpack(before, len(before)) is None


@given(st.none() | st.dictionaries(st.text(), st.integers() | st.text()))
def test_any_report_of_costs_is_parsed(found):
    assert all(value >= 0 for value in costs.parse(found).values())


def test_a_feeder_adds_up_its_batches():
    mine = FeederCosts()
    mine.add(BatchCost(1000, 200, 30, 5_000_000))
    mine.add(BatchCost(1000, 200, 30, 7_000_000, 40))
    mine.look(sending=True)
    mine.look(sending=False)
    assert mine.report() == {
        "built": 2, "samples_ns": 2000, "collate_ns": 400, "encode_ns": 60, "wall_ns": 12_000_000,
        "wall_us2": 5000**2 + 7000**2, "queued_ns": 40, "looks": 2, "sending": 1, "slots": 0,
    }  # fmt: skip


def test_the_clock_tells_samples_from_collate_and_encode():
    def burn(seconds):
        until = clock_s() + seconds
        while clock_s() < until:
            pass

    from time import process_time as clock_s

    clock = CostClock(QueuedTime())
    clock.begin()
    burn(0.03)
    clock.collate()
    burn(0.02)
    clock.encode()
    burn(0.01)
    cost = clock.end()
    assert cost.samples == pytest.approx(30e6, rel=0.2)
    assert cost.collate == pytest.approx(20e6, rel=0.2)
    assert cost.encode == pytest.approx(10e6, rel=0.3)
    assert cost.wall >= cost.samples + cost.collate + cost.encode


def test_readings_at_one_time_are_harmless():
    window = MeasuresWindow()
    for _ in range(3):
        window.add(1.0, {"a": {"receivers": 1, "metrics": {"next_calls": 50}}}, {}, 1)
    assert window.measures() is None
