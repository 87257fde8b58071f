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
    RestartPolicy,
    ServicePart,
    ServiceState,
    Start,
    StopHead,
    StopSupervisor,
)


def up() -> RestartPolicy:
    """Everything runs."""
    policy = RestartPolicy()
    policy.start()
    policy.serves(ServicePart.SIDECAR)
    policy.serves(ServicePart.HEAD)
    policy.serves(ServicePart.SUPERVISOR)
    return policy


def test_sidecar_and_head_start_together_and_the_supervisor_after_the_head():
    policy = RestartPolicy()
    assert policy.start() == [Start(ServicePart.SIDECAR, 1), Start(ServicePart.HEAD, 1)]
    assert policy.serves(ServicePart.SIDECAR) == []
    assert policy.serves(ServicePart.HEAD) == [Start(ServicePart.SUPERVISOR, 1)]
    assert policy.serves(ServicePart.HEAD) == [], "told twice, started once"


@pytest.mark.parametrize("part", [ServicePart.SIDECAR, ServicePart.SUPERVISOR])
def test_part_that_dies_once_is_restarted_at_once(part: ServicePart):
    assert up().ended(part, -9, "", 10.0) == [Start(part, 1)]


def test_part_that_dies_repeatedly_is_restarted_with_growing_delays():
    policy = up()
    policy.ended(ServicePart.SIDECAR, -9, "", 10.0)
    policy.serves(ServicePart.SIDECAR)
    assert policy.ended(ServicePart.SIDECAR, -9, "", 11.0) == []
    assert policy.due(11.4) == []
    assert policy.due(11.5) == [Start(ServicePart.SIDECAR, 1)]
    policy.serves(ServicePart.SIDECAR)
    assert policy.ended(ServicePart.SIDECAR, -9, "", 12.0) == []
    assert policy.due(12.9) == []
    assert policy.due(13.0) == [Start(ServicePart.SIDECAR, 1)]


def test_part_that_keeps_dying_is_given_up_with_its_last_output():
    policy = up()
    for death in range(MAX_CRASHES):
        assert not any(
            isinstance(i, GiveUp) for i in policy.ended(ServicePart.SUPERVISOR, 1, "", 10.0 * death)
        )
        policy.due(10.0 * death + 9)
        policy.serves(ServicePart.SUPERVISOR)
    (give_up,) = policy.ended(ServicePart.SUPERVISOR, 1, "the port is taken", 10.0 * MAX_CRASHES)
    assert give_up == GiveUp("the supervisor ended 7 times within 120 s: the port is taken")


def test_deaths_long_ago_do_not_count():
    policy = up()
    for death in range(3 * MAX_CRASHES):
        now = death * CRASH_WINDOW_S
        assert policy.ended(ServicePart.SIDECAR, -9, "", now) == [Start(ServicePart.SIDECAR, 1)]
        policy.serves(ServicePart.SIDECAR)


def test_a_sidecar_that_never_served_is_given_up_at_once():
    policy = RestartPolicy()
    policy.start()
    assert policy.ended(ServicePart.SIDECAR, 2, "no room", 1.0) == [
        GiveUp("the sidecar ended before it served: no room")
    ]


def test_dead_gcs_gets_a_new_head_while_the_old_one_serves():
    policy = up()
    assert policy.head_lost(1, "gcs_server ended", 10.0, feeders_live=True) == [
        StopSupervisor(),
        Start(ServicePart.HEAD, 2),
    ]
    assert policy.serves(ServicePart.HEAD) == [Start(ServicePart.SUPERVISOR, 2)]
    assert policy.old == {1: 10.0}
    assert policy.settled() == [StopHead(1)]
    assert policy.settled() == []


def test_head_with_a_dead_raylet_is_ended_at_once():
    assert up().head_lost(1, "raylet ended", 10.0, feeders_live=False) == [
        StopSupervisor(),
        StopHead(1),
        Start(ServicePart.HEAD, 2),
    ]


def test_old_head_is_ended_if_its_raylet_dies_too():
    policy = up()
    policy.head_lost(1, "gcs_server ended", 10.0, feeders_live=True)
    assert policy.head_lost(1, "raylet ended", 11.0, feeders_live=False) == [StopHead(1)]
    assert policy.old == {}


def test_old_head_is_kept_for_a_limited_time():
    policy = up()
    policy.head_lost(1, "gcs_server ended", 10.0, feeders_live=True)
    assert policy.due(10.0 + KEEP_OLD_S) == [StopHead(1)]


def test_old_supervisors_end_starts_none_before_the_new_head_is_up():
    policy = up()
    policy.head_lost(1, "gcs_server ended", 10.0, feeders_live=True)
    assert policy.ended(ServicePart.SUPERVISOR, 4, "", 10.1) == []
    assert policy.state(ServicePart.SUPERVISOR) is ServiceState.ABSENT


def test_supervisor_failing_twice_with_its_head_gets_another_head():
    policy = up()
    assert policy.ended(ServicePart.SUPERVISOR, 4, "Ray lost", 10.0) == [Start(ServicePart.SUPERVISOR, 1)]
    assert policy.ended(ServicePart.SUPERVISOR, 3, "Ray late", 70.0) == [Start(ServicePart.HEAD, 2)]
    assert policy.old == {1: 70.0}


def test_head_that_cannot_start_is_retried_and_given_up_with_rays_error():
    policy = RestartPolicy()
    policy.start()
    instructions = []
    for attempt in range(MAX_FIRST_CRASHES + 1):
        instructions = policy.head_lost(policy.head_number, "no memory", 10.0 * attempt, feeders_live=False)
        policy.due(10.0 * attempt + 9)
    assert instructions == [StopHead(3), GiveUp("the Ray head ended 3 times within 120 s: no memory")]


def test_without_ray_all_parts_start_and_restart_independently():
    policy = RestartPolicy(ServicePart.HOST)
    assert policy.start() == [
        Start(ServicePart.HOST, 0),
        Start(ServicePart.SIDECAR, 0),
        Start(ServicePart.SUPERVISOR, 0),
    ]
    for part in (ServicePart.HOST, ServicePart.SIDECAR, ServicePart.SUPERVISOR):
        policy.serves(part)
        assert policy.ended(part, EXIT_RAY_LOST, "", 10.0) == [Start(part, 0)]


def test_host_that_cannot_serve_is_given_up_with_its_last_output():
    policy = RestartPolicy(ServicePart.HOST)
    policy.start()
    for death in range(MAX_FIRST_CRASHES):
        policy.ended(ServicePart.HOST, 1, "no torch", 10.0 * death)
        policy.due(10.0 * death + 9)
    (give_up,) = policy.ended(ServicePart.HOST, 1, "No module named 'torch'", 30.0)
    assert give_up == GiveUp("the feeder host ended 3 times within 120 s: No module named 'torch'")


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["sidecar", "supervisor", "gcs", "raylet", "old", "up", "settled", "time"]),
        st.floats(0.01, 30.0),
    ),
    max_size=60,
)


@given(EVENTS)
def test_any_order_of_deaths_keeps_one_of_each_part_and_ends_old_heads(events):
    policy, now = RestartPolicy(), 0.0
    running = {ServicePart.SIDECAR: 0, ServicePart.SUPERVISOR: 0}
    heads: set[int] = set()
    given_up = False

    def do(instructions):
        nonlocal given_up
        for i in instructions:
            if isinstance(i, Start) and i.part is ServicePart.HEAD:
                assert i.number not in heads
                heads.add(i.number)
            elif isinstance(i, Start):
                running[i.part] += 1
                assert running[i.part] == 1, "two of a kind"
            elif isinstance(i, StopSupervisor):
                running[ServicePart.SUPERVISOR] = 0
            elif isinstance(i, StopHead):
                heads.remove(i.number)
            else:
                given_up = True

    do(policy.start())
    for name, delay in events:
        now += delay
        if name in ("sidecar", "supervisor") and running[ServicePart(name)]:
            running[ServicePart(name)] = 0
            do(policy.ended(ServicePart(name), -9, "", now))
        elif name in ("gcs", "raylet") and policy.head_number in heads:
            do(policy.head_lost(policy.head_number, name, now, feeders_live=name == "gcs"))
        elif name == "old" and policy.old:
            do(policy.head_lost(next(iter(policy.old)), "raylet", now, feeders_live=False))
        elif name == "up":
            for part in ServicePart:
                if (part is ServicePart.HEAD and policy.head_number in heads) or running.get(part):
                    do(policy.serves(part))
        elif name == "settled":
            do(policy.settled())
        do(policy.due(now))
        if given_up:
            return
        assert heads <= {policy.head_number, *policy.old}
        assert set(policy.old) <= heads
    for _ in range(20):  # left alone, everything comes back
        now += 10
        do(policy.due(now))
        for part in (ServicePart.HEAD, ServicePart.SIDECAR, ServicePart.SUPERVISOR):
            if (part is ServicePart.HEAD and policy.head_number in heads) or running.get(part):
                do(policy.serves(part))
    do(policy.settled())
    assert all(
        policy.state(part) is ServiceState.UP
        for part in (ServicePart.HEAD, ServicePart.SIDECAR, ServicePart.SUPERVISOR)
    )
    assert heads == {policy.head_number}
