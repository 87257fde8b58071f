"""The policy that scales feeders, on simulated jobs in virtual time."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sim_job import SimJob

from dataloaderjob.core.autoscaling import (
    DOWN_AFTER_S,
    EVERY_S,
    SATURATED_S,
    Autoscaler,
    Bounds,
    Proposal,
    Reason,
    Situation,
)
from dataloaderjob.core.sizing import HEADROOM

BOUNDS = Bounds(least=1, most=64)


@dataclass
class Run:
    """A job under the policy, and its changes: (time, before, after)."""

    job: SimJob
    scaler: Autoscaler = field(default_factory=lambda: Autoscaler(BOUNDS))
    frozen: Callable[[float], str] = lambda now: ""
    step: int = 1
    changes: list[tuple[float, int, int]] = field(default_factory=list)
    last: Proposal | None = None
    rate: float = 0.0
    """Batches per second over the last EVERY_S."""

    def until(self, end: float) -> Run:
        job = self.job
        while job.now < end:
            before = job.taken
            for _ in range(int(EVERY_S)):
                job.second()
            self.rate = (job.taken - before) / EVERY_S
            self.last = self.scaler.step(
                job.now,
                Situation(
                    desired=job.desired, ready=job.ready, measures=job.window.measures(),
                    frozen=self.frozen(job.now), step=self.step,
                ),
            )  # fmt: skip
            if self.last.feeders != job.desired:
                self.changes.append((job.now, job.desired, self.last.feeders))
                job.scale(self.last.feeders)
        return self

    @property
    def most(self) -> int:
        return max((after for _, _, after in self.changes), default=self.job.desired)


def best(job: SimJob) -> int:
    """The number that somebody who knows the job would choose: enough for its rate, with the reserve."""
    busy = HEADROOM - 0.1 * min(1.0, job.spread)
    return math.ceil(job.rate_of(10_000) * job.cost_s / busy - 1e-9)


JOBS = [
    pytest.param({}, id="one rank"),
    pytest.param(
        {"ranks": 8, "step_s": lambda now: 0.25, "noise": 0.1, "spread": 0.5}, id="eight noisy ranks"
    ),
    pytest.param({"cost_s": 0.05, "step_s": lambda now: 0.01, "noise": 0.2}, id="small batches"),
    pytest.param({"cost_s": 1.0, "step_s": lambda now: 0.3, "start_s": lambda number: 12.0}, id="slow start"),
    pytest.param({"cost_s": 2.0, "ranks": 2, "step_s": lambda now: 0.5, "spread": 1.5}, id="heavy tail"),
    pytest.param({"idle": 0.9, "noise": 0.1}, id="storage"),
]


@pytest.mark.parametrize("kind", JOBS)
def test_the_best_rate_is_reached_soon_and_without_excess(kind):
    run = Run(SimJob(**kind))
    while run.job.now < 150 and not (run.job.taken and run.rate >= 0.9 * run.job.rate_of(10_000)):
        run.until(run.job.now + EVERY_S)
    began = next(at for at, _, _ in run.changes)
    assert run.job.now <= 90 + max(0.0, began - 20)
    assert run.most <= max(1.25 * best(run.job), best(run.job) + 1)


@pytest.mark.parametrize("kind", JOBS)
def test_a_constant_load_changes_almost_nothing(kind):
    run = Run(SimJob(**kind)).until(180)
    changes = len(run.changes)
    run.until(180 + 1800)
    assert len(run.changes) - changes <= 2
    assert run.rate >= 0.9 * run.job.rate_of(10_000) * (1 - run.job.noise)


@pytest.mark.parametrize("kind", JOBS)
def test_half_the_load_releases_half_the_feeders_in_six_minutes(kind):
    run = Run(SimJob(**kind)).until(600)
    high, step_s = run.job.desired, run.job.step_s
    run.job.step_s = lambda now: 2 * step_s(now)
    run.until(600 + 360)
    assert run.job.desired <= max(best(run.job) + 1, 0.6 * high)
    assert run.job.desired >= best(run.job) - 1


def test_feeders_that_never_start_are_not_added_to():
    run = Run(SimJob(step_s=lambda now: 0.05, start_s=lambda number: 5.0 if number < 3 else 1e9)).until(900)
    assert run.job.desired == 4
    assert run.last.reason is Reason.PENDING


def test_feeders_that_start_late_are_awaited():
    run = Run(SimJob(step_s=lambda now: 0.05, start_s=lambda number: 5.0 if number < 1 else 100.0))
    run.until(120)
    assert run.job.desired == 4
    assert run.until(400).job.desired == best(run.job)


def test_a_saturated_link_ends_the_growth():
    run = Run(SimJob(step_s=lambda now: 0.05, link=4e6)).until(SATURATED_S)
    assert run.job.desired <= best(run.job) + 1
    assert len(run.changes) <= 3
    assert run.rate >= 0.9 * run.job.rate_of(10_000)


class SharedStorage(SimJob):
    """Storage that serves at most `most_rate` batches per second: each takes longer if more feeders read at a time."""

    most_rate = 6.0
    alone_s = 0.5

    def second(self) -> None:
        self.cost_s = max(self.alone_s, self.ready / self.most_rate)
        super().second()


def test_saturated_storage_ends_the_growth_and_takes_it_back():
    run = Run(SharedStorage(step_s=lambda now: 0.05, idle=0.9)).until(SATURATED_S)
    assert run.job.desired <= 5
    assert run.rate >= 0.9 * 6.0
    assert run.last.reason is Reason.SATURATED


def test_a_saturated_job_is_tried_again_ever_more_seldom():
    run = Run(SharedStorage(step_s=lambda now: 0.05, idle=0.9)).until(20_000)
    ups = [at for at, before, after in run.changes if after > before and at > 200]
    gaps = [late - early for early, late in itertools.pairwise(ups) if late - early > 300]
    assert gaps == sorted(gaps)
    assert len(run.changes) <= 40


def test_a_starved_trainer_that_queues_kernels_does_not_ask_for_all():
    run = Run(SimJob(launch_s=0.001)).until(120)
    assert run.most < 2 * best(run.job)
    run.until(120 + DOWN_AFTER_S + 120)
    assert run.job.desired == best(run.job)
    changes = len(run.changes)
    assert len(run.until(2000).changes) == changes


def test_checkpoints_and_evaluations_change_nothing():
    run = Run(
        SimJob(
            paused=lambda now: 300 < now % 600 < 340,
            step_s=lambda now: 0.02 if 400 < now % 600 < 480 else 0.1,
            evaluates=lambda now: 400 < now % 600 < 480,
        )
    ).until(290)
    assert run.job.desired == best(run.job)
    changes = len(run.changes)
    assert len(run.until(3000).changes) == changes


def test_a_lull_of_four_minutes_changes_nothing():
    run = Run(SimJob(step_s=lambda now: 0.2 if 300 < now < 540 else 0.1)).until(300)
    changes = len(run.changes)
    assert len(run.until(900).changes) == changes


def test_a_trainer_that_starves_again_does_not_ask_for_all():
    run = Run(SimJob(launch_s=0.001)).until(600)
    changes, run.job.cost_s = len(run.changes), 1.0
    run.until(900)
    assert max(after for _, _, after in run.changes[changes:]) == best(run.job)


def test_nothing_changes_while_frozen():
    run = Run(SimJob(), frozen=lambda now: "the trainers restart" if now < 200 else "").until(190)
    assert run.changes == []
    assert (run.last.reason, run.last.text) == (Reason.FROZEN, "the trainers restart")
    assert run.until(320).job.desired == best(run.job)


def test_a_restart_of_all_trainers_forgets_what_was_wanted():
    run = Run(SimJob()).until(400)
    run.frozen = lambda now: "the trainers restart"
    run.until(420)
    run.frozen = lambda now: ""
    run.job.step_s = lambda now: 0.2
    before = len(run.changes)
    assert len(run.until(420 + DOWN_AFTER_S - 2 * EVERY_S).changes) == before
    assert run.until(420 + DOWN_AFTER_S + 60).job.desired == best(run.job)


def test_unknown_measures_change_nothing():
    scaler = Autoscaler(BOUNDS)
    assert scaler.step(0.0, Situation(desired=5, ready=5, measures=None)).feeders == 5
    assert scaler.step(10.0, Situation(desired=5, ready=5, measures=None)).reason is Reason.UNKNOWN


def test_a_number_outside_the_bounds_is_brought_inside():
    scaler = Autoscaler(Bounds(least=2, most=8))
    assert scaler.step(0.0, Situation(desired=1, ready=1, measures=None)).feeders == 2
    assert scaler.step(20.0, Situation(desired=30, ready=30, measures=None)).feeders == 8


def test_the_ceiling_holds():
    run = Run(SimJob(step_s=lambda now: 0.01), Autoscaler(Bounds(least=1, most=5))).until(600)
    assert run.most == 5


def test_feeders_are_added_in_whole_pods():
    run = Run(SimJob(step_s=lambda now: 0.05, desired=4), step=4).until(200)
    assert run.job.desired % 4 == 0
    assert run.job.desired >= best(run.job)


def test_slots_of_a_stream_bound_the_number():
    run = Run(SimJob(step_s=lambda now: 0.01, slots=3)).until(600)
    assert run.most <= 3


def test_feeders_that_hold_slots_are_not_removed():
    run = Run(SimJob(desired=4, slots=4, step_s=lambda now: 2.0)).until(1500)
    assert run.job.desired == 4


def trace(seed: int) -> Callable[[float], float]:
    """An hour or two of training: the length of a step changes every 15 to 40 minutes by up to a factor of four."""
    rng, changes, at = random.Random(seed), list[tuple[float, float]](), 0.0
    while at < 7200:
        changes.append((at, 0.05 * 2 ** rng.uniform(0, 2)))
        at += rng.uniform(900, 2400)

    def step_s(now: float) -> float:
        return [length for start, length in changes if start <= now][-1]

    return step_s


@pytest.mark.parametrize("seed", range(6))
def test_a_trace_costs_hardly_more_than_somebody_who_knows_it_pays(seed):
    run = Run(SimJob(step_s=trace(seed), noise=0.05, spread=0.3, seed=seed))
    ideal, possible = 0.0, 0.0
    while run.job.now < 7200:
        ideal += EVERY_S * best(run.job)
        possible += EVERY_S * run.job.rate_of(10_000)
        run.until(run.job.now + EVERY_S)
    assert run.job.cost <= 1.15 * ideal
    assert run.job.taken >= 0.93 * possible


@settings(max_examples=25, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    cost_s=st.floats(0.01, 3), step_s=st.floats(0.005, 1), ranks=st.integers(1, 8), spread=st.floats(0, 2),
    noise=st.floats(0, 0.3), start_s=st.floats(0, 60), link=st.floats(1e6, 1e9), seed=st.integers(0, 99),
    launch_s=st.none() | st.floats(0.0001, 0.01),
)  # fmt: skip
def test_any_job_stays_within_bounds_and_becomes_calm(
    cost_s, step_s, ranks, spread, noise, start_s, link, seed, launch_s
):
    job = SimJob(
        cost_s=cost_s, step_s=lambda now: step_s, ranks=ranks, spread=spread, noise=noise,
        start_s=lambda number: start_s, link=link, seed=seed, launch_s=launch_s,
    )  # fmt: skip
    run = Run(job).until(1800)
    assert all(1 <= after <= 64 for _, _, after in run.changes)
    assert all(after <= 4 * before for _, before, after in run.changes)
    assert len([1 for at, _, _ in run.changes if at > 600]) <= 5
