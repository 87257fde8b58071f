"""Which part of the local service is started again when, and when it is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core.supervision import EXIT_RAY_LOST
from dataloaderjob.local.restarts import (
    CRASH_WINDOW_S,
    KEEP_OLD_S,
    MAX_CRASHES,
    MAX_FIRST_CRASHES,
    GiveUp,
    Part,
    RestartPolicy,
    Start,
    State,
    StopHead,
    StopSupervisor,
)


def up() -> RestartPolicy:
    """Everything runs."""
    care = RestartPolicy()
    care.start()
    care.serves(Part.SIDECAR)
    care.serves(Part.HEAD)
    care.serves(Part.SUPERVISOR)
    return care


def test_sidecar_and_head_start_together_and_the_supervisor_when_the_head_serves():
    care = RestartPolicy()
    assert care.start() == [Start(Part.SIDECAR, 1), Start(Part.HEAD, 1)]
    assert care.serves(Part.SIDECAR) == []
    assert care.serves(Part.HEAD) == [Start(Part.SUPERVISOR, 1)]
    assert care.serves(Part.HEAD) == [], "told twice, started once"


@pytest.mark.parametrize("part", [Part.SIDECAR, Part.SUPERVISOR])
def test_a_part_that_died_once_is_started_again_at_once(part: Part):
    assert up().ended(part, -9, "", 10.0) == [Start(part, 1)]


def test_a_part_that_dies_again_is_started_later_each_time():
    care = up()
    care.ended(Part.SIDECAR, -9, "", 10.0)
    care.serves(Part.SIDECAR)
    assert care.ended(Part.SIDECAR, -9, "", 11.0) == []
    assert care.due(11.4) == []
    assert care.due(11.5) == [Start(Part.SIDECAR, 1)]
    care.serves(Part.SIDECAR)
    assert care.ended(Part.SIDECAR, -9, "", 12.0) == []
    assert care.next_deadline == 13.0


def test_a_part_that_dies_again_and_again_is_given_up_with_its_last_words():
    care = up()
    for death in range(MAX_CRASHES):
        assert not any(isinstance(i, GiveUp) for i in care.ended(Part.SUPERVISOR, 1, "", 10.0 * death))
        care.due(10.0 * death + 9)
        care.serves(Part.SUPERVISOR)
    (give_up,) = care.ended(Part.SUPERVISOR, 1, "the port is taken", 10.0 * MAX_CRASHES)
    assert give_up == GiveUp("the supervisor ended 7 times within 120 s: the port is taken")


def test_deaths_of_long_ago_do_not_count():
    care = up()
    for death in range(3 * MAX_CRASHES):
        now = death * CRASH_WINDOW_S
        assert care.ended(Part.SIDECAR, -9, "", now) == [Start(Part.SIDECAR, 1)]
        care.serves(Part.SIDECAR)


def test_a_sidecar_that_never_served_is_given_up_at_once():
    care = RestartPolicy()
    care.start()
    assert care.ended(Part.SIDECAR, 2, "no room", 1.0) == [
        GiveUp("the sidecar ended before it served: no room")
    ]


def test_a_gcs_that_dies_is_replaced_by_a_whole_head_and_the_old_one_serves_until_the_new_one_does():
    care = up()
    assert care.head_lost(1, "gcs_server ended", 10.0, feeders_live=True) == [
        StopSupervisor(),
        Start(Part.HEAD, 2),
    ]
    assert care.serves(Part.HEAD) == [Start(Part.SUPERVISOR, 2)]
    assert care.old == {1: 10.0}
    assert care.settled() == [StopHead(1)]
    assert care.settled() == []


def test_a_raylet_that_dies_takes_its_feeders_along_and_its_head_is_ended_at_once():
    assert up().head_lost(1, "raylet ended", 10.0, feeders_live=False) == [
        StopSupervisor(),
        StopHead(1),
        Start(Part.HEAD, 2),
    ]


def test_an_old_head_whose_raylet_dies_too_is_ended():
    care = up()
    care.head_lost(1, "gcs_server ended", 10.0, feeders_live=True)
    assert care.head_lost(1, "raylet ended", 11.0, feeders_live=False) == [StopHead(1)]
    assert care.old == {}


def test_an_old_head_is_not_kept_for_ever():
    care = up()
    care.head_lost(1, "gcs_server ended", 10.0, feeders_live=True)
    assert care.due(10.0 + KEEP_OLD_S) == [StopHead(1)]


def test_the_old_supervisor_s_end_does_not_start_one_against_a_head_that_is_not_up():
    care = up()
    care.head_lost(1, "gcs_server ended", 10.0, feeders_live=True)
    assert care.ended(Part.SUPERVISOR, 4, "", 10.1) == []
    assert care.state(Part.SUPERVISOR) is State.ABSENT


def test_a_supervisor_that_cannot_work_with_its_head_twice_gets_another_head():
    care = up()
    assert care.ended(Part.SUPERVISOR, 4, "Ray lost", 10.0) == [Start(Part.SUPERVISOR, 1)]
    assert care.ended(Part.SUPERVISOR, 3, "Ray late", 70.0) == [Start(Part.HEAD, 2)]
    assert care.old == {1: 70.0}


def test_a_head_that_cannot_be_started_is_tried_again_and_given_up_with_ray_s_words():
    care = RestartPolicy()
    care.start()
    instructions = []
    for attempt in range(MAX_FIRST_CRASHES + 1):
        instructions = care.head_lost(care.head_number, "no memory", 10.0 * attempt, feeders_live=False)
        care.due(10.0 * attempt + 9)
    assert instructions == [StopHead(3), GiveUp("the Ray head ended 3 times within 120 s: no memory")]


def test_without_ray_all_parts_start_at_once_the_slowest_first_and_each_is_started_again_by_itself():
    care = RestartPolicy(ray=False)
    assert care.start() == [Start(Part.HOST, 0), Start(Part.SIDECAR, 0), Start(Part.SUPERVISOR, 0)]
    for part in (Part.HOST, Part.SIDECAR, Part.SUPERVISOR):
        care.serves(part)
        assert care.ended(part, EXIT_RAY_LOST, "", 10.0) == [Start(part, 0)]


def test_a_host_that_cannot_serve_is_given_up_with_its_last_words():
    care = RestartPolicy(ray=False)
    care.start()
    for death in range(MAX_FIRST_CRASHES):
        care.ended(Part.HOST, 1, "no torch", 10.0 * death)
        care.due(10.0 * death + 9)
    (give_up,) = care.ended(Part.HOST, 1, "No module named 'torch'", 30.0)
    assert give_up == GiveUp("the feeder host ended 3 times within 120 s: No module named 'torch'")


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["sidecar", "supervisor", "gcs", "raylet", "old", "up", "settled", "time"]),
        st.floats(0.01, 30.0),
    ),
    max_size=60,
)


@given(EVENTS)
def test_in_any_order_of_deaths_there_is_one_of_each_part_and_old_heads_are_ended_once(events):
    care, now = RestartPolicy(), 0.0
    running = {Part.SIDECAR: 0, Part.SUPERVISOR: 0}
    heads: set[int] = set()
    given_up = False

    def do(instructions):
        nonlocal given_up
        for i in instructions:
            if isinstance(i, Start) and i.part is Part.HEAD:
                assert i.number not in heads
                heads.add(i.number)
            elif isinstance(i, Start):
                running[i.part] += 1
                assert running[i.part] == 1, "two of a kind"
            elif isinstance(i, StopSupervisor):
                running[Part.SUPERVISOR] = 0
            elif isinstance(i, StopHead):
                heads.remove(i.number)
            else:
                given_up = True

    do(care.start())
    for name, delay in events:
        now += delay
        if name in ("sidecar", "supervisor") and running[Part(name)]:
            running[Part(name)] = 0
            do(care.ended(Part(name), -9, "", now))
        elif name in ("gcs", "raylet") and care.head_number in heads:
            do(care.head_lost(care.head_number, name, now, feeders_live=name == "gcs"))
        elif name == "old" and care.old:
            do(care.head_lost(next(iter(care.old)), "raylet", now, feeders_live=False))
        elif name == "up":
            for part in Part:
                if (part is Part.HEAD and care.head_number in heads) or running.get(part):
                    do(care.serves(part))
        elif name == "settled":
            do(care.settled())
        do(care.due(now))
        if given_up:
            return
        assert heads <= {care.head_number, *care.old}
        assert set(care.old) <= heads
    for _ in range(20):  # left alone, everything comes back
        now += 10
        do(care.due(now))
        for part in (Part.HEAD, Part.SIDECAR, Part.SUPERVISOR):
            if (part is Part.HEAD and care.head_number in heads) or running.get(part):
                do(care.serves(part))
    do(care.settled())
    assert all(care.state(part) is State.UP for part in (Part.HEAD, Part.SIDECAR, Part.SUPERVISOR))
    assert heads == {care.head_number}
