"""When trainers of a run are started, told to end and killed, and what the run's exit code is."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.local.plan import (
    EXIT_BROKEN,
    EXIT_LATE,
    GRACE_S,
    TRANSITIONS,
    Lifecycle,
    RunEvent,
    RunState,
    Stop,
    stopped_by,
)


def training(num_trainers: int = 1) -> Lifecycle:
    lifecycle = Lifecycle(num_trainers)
    assert lifecycle.move(RunEvent.SERVED) is RunState.TRAINING
    return lifecycle


def test_trainers_start_once_when_the_sidecar_listens():
    lifecycle = Lifecycle(1)
    assert lifecycle.state is RunState.PREPARING
    assert lifecycle.move(RunEvent.SERVED) is RunState.TRAINING
    assert lifecycle.move(RunEvent.SERVED) is None


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 0), 0), ((0, 3), 3), ((3, 0), 3), ((7, 3), 7), ((137, 1), 137)],
)
def test_exit_code_is_the_first_nonzero_one(codes: tuple[int, ...], code: int):
    lifecycle = training(len(codes))
    for number, each in enumerate(codes):
        lifecycle.ended(number, each)
    assert lifecycle.state is RunState.OVER
    assert lifecycle.code == code


def test_after_one_replica_fails_the_others_have_time_to_fail_themselves():
    lifecycle = training(2)
    assert lifecycle.ended(1, 3) is RunState.FAILING
    assert GRACE_S[RunState.FAILING] == 5.0
    assert lifecycle.move(RunEvent.GRACE) is RunState.ENDING
    assert lifecycle.move(RunEvent.GRACE) is RunState.KILLING
    lifecycle.ended(0, 137)
    assert lifecycle.state is RunState.OVER
    assert lifecycle.code == 3
    assert lifecycle.first_failure == (1, 3)


def test_replica_that_ends_well_leaves_the_others_running():
    lifecycle = training(2)
    assert lifecycle.ended(0, 0) is None
    assert lifecycle.state is RunState.TRAINING


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_ends_the_trainers_and_sets_the_exit_code(number: int, code: int):
    lifecycle = training()
    assert lifecycle.halt(stopped_by(number)) is RunState.ENDING
    assert lifecycle.stop is not None
    assert lifecycle.stop.number == number
    lifecycle.ended(0, 0)
    assert lifecycle.code == code


def test_second_signal_kills_the_trainers():
    lifecycle = training()
    lifecycle.halt(stopped_by(signal.SIGINT))
    assert lifecycle.halt(stopped_by(signal.SIGTERM)) is RunState.KILLING
    lifecycle.ended(0, 137)
    assert lifecycle.code == 130, "the first reason counts"


def test_signal_before_any_trainer_starts_ends_the_run():
    lifecycle = Lifecycle(2)
    assert lifecycle.halt(stopped_by(signal.SIGTERM)) is RunState.OVER
    assert lifecycle.code == 143


def test_a_signal_after_a_failure_keeps_the_failure_s_code():
    lifecycle = training(2)
    lifecycle.ended(0, 3)
    assert lifecycle.halt(stopped_by(signal.SIGINT)) is RunState.ENDING
    lifecycle.ended(1, 130)
    assert lifecycle.code == 3


@pytest.mark.parametrize("stop", [Stop(EXIT_LATE, "late"), Stop(EXIT_BROKEN, "broken")])
def test_deadlines_and_a_broken_service_have_their_own_exit_codes(stop: Stop):
    lifecycle = training()
    assert lifecycle.halt(stop) is RunState.ENDING
    lifecycle.ended(0, 143)
    assert lifecycle.code == stop.code


@given(st.lists(st.sampled_from(list(RunEvent))))
def test_run_that_is_over_stays_over_after_any_event(events: list[RunEvent]):
    lifecycle = Lifecycle(1)
    over = False
    for event in events:
        entered = lifecycle.move(event)
        assert not over or (lifecycle.state is RunState.OVER and entered is None)
        over = lifecycle.state is RunState.OVER


def test_every_state_except_the_last_has_an_exit():
    for state in RunState:
        assert state is RunState.OVER or any(before is state for before, _ in TRANSITIONS)
