"""The steps that `dataloaderjob advise` counts, in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from torch.utils import data

from dataloaderjob.advise.observation import (
    LEAST,
    OBSERVE_S,
    REPLAYED,
    SKIPPED,
    Observation,
    Steps,
    WatchPhase,
    steps_of,
)
from dataloaderjob.advise.source import Source


class Loop:
    """A training loop in virtual time: waits for each batch, then computes."""

    def __init__(self, steps: int, wait_s: float, think_s: float) -> None:
        self.now, self.wait_s, self.think_s = 100.0, wait_s, think_s
        self.observation = Observation(steps, self.now)

    def step(self, *, is_first: bool = False, think_s: float | None = None) -> None:
        self.observation.called(self.now, is_first=is_first)
        self.now += self.wait_s
        self.observation.returned(self.now)
        self.now += self.think_s if think_s is None else think_s

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()


def test_phases_follow_each_other_after_enough_steps() -> None:
    loop = Loop(10, 0.3, 0.1)
    loop.steps(1 + SKIPPED + 10)
    assert loop.observation.phase is WatchPhase.REPLAYING
    loop.wait_s = 0.0
    loop.steps(REPLAYED)
    assert loop.observation.phase is WatchPhase.DONE
    assert loop.observation.observed.period_s() == pytest.approx(0.4)
    assert loop.observation.replayed.step_s() == pytest.approx(0.1)


def test_step_is_the_median_of_its_times() -> None:
    assert Steps(thinks=[3, 1, 2]).step_s() == 2
    assert Steps(thinks=[4, 1, 2, 3]).step_s() == 2.5


def test_slow_steps_are_cut_short_by_time() -> None:
    loop = Loop(1000, 4.0, 4.0)
    loop.steps(1 + SKIPPED + LEAST)
    assert loop.now - 100 > OBSERVE_S
    assert loop.observation.phase is WatchPhase.REPLAYING


def test_a_pause_for_a_checkpoint_does_not_count() -> None:
    loop = Loop(20, 0.1, 0.1)
    loop.steps(10)
    loop.step(think_s=60.0)
    loop.steps(12)
    assert loop.observation.observed.period_s() == pytest.approx(0.2)


def test_the_gap_between_two_epochs_does_not_count() -> None:
    loop = Loop(20, 0.1, 0.1)
    loop.steps(10)
    loop.now += 0.3
    loop.step(is_first=True)
    loop.steps(8)
    assert max(loop.observation.observed.thinks) == pytest.approx(0.1)


def test_steps_that_a_device_queues_count_by_their_mean() -> None:
    loop = Loop(40, 0.0, 0.01)
    for number in range(SKIPPED + 41):
        loop.step(think_s=0.045 if number % 10 == 0 else 0.01)
    observed = loop.observation.observed
    assert observed.period_s() == pytest.approx(0.01)
    assert observed.period_s(is_queued=True) == pytest.approx(0.0135, rel=0.05)


def test_bursts_of_waiting_count_in_full() -> None:
    loop = Loop(40, 0.0, 0.1)
    for number in range(SKIPPED + 41):
        loop.wait_s = 0.8 if number % 8 == 0 else 0.0
        loop.step()
    assert loop.observation.observed.period_s() == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize(
    ("batches", "steps"), [(None, 50), (1000, 50), (54, 50), (19, 15), (12, 10), (3, 10), (0, 10)]
)
def test_short_epoch_is_observed_once_and_then_replayed(batches: int | None, steps: int) -> None:
    assert steps_of(50, batches) == steps


class Counting:
    """A batch sampler of the user's, which counts the calls of its length."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])

    def __len__(self) -> int:
        self.asked += 1
        return 2


class Endless(data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return itertools.count()

    def __len__(self) -> int:
        return 8


def test_length_of_an_epoch_is_known_from_torchs_own_samplers_alone() -> None:
    for options in ({}, {"shuffle": True}):
        assert Source.of(iter(data.DataLoader(range(8), batch_size=2, **options))).batches == 4
    assert Source.of(iter(data.DataLoader(Endless(), batch_size=2))).batches is None
    sampler = Counting()
    iterator = iter(data.DataLoader(range(8), batch_sampler=sampler))
    sampler.asked = 0
    assert Source.of(iterator).batches is None
    assert sampler.asked == 0
