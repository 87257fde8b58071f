"""Which feeders are placed, listed, drained and killed, and when. Time is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core.supervision import Cause, index_of, name_of, worst
from dataloaderjob.supervisor.feeder_set import (
    BACKOFF,
    TROUBLE_S,
    Drain,
    Endpoint,
    FeederPlace,
    FeederSet,
    FeederState,
    Kill,
)


def feeders(desired: int) -> FeederSet:
    return FeederSet(desired, ready_timeout_s=100, drain_timeout_s=10)


def feeder(index: int, instance: str = "x") -> Endpoint:
    return Endpoint(name_of(index), f"{index}{instance}", "127.0.0.1", 1000 + index)


def names(made: FeederSet) -> list[str]:
    return [e.name for e in made.listed()]


def ready(desired: int) -> FeederSet:
    made = feeders(desired)
    assert made.step(0) == [FeederPlace(i) for i in range(desired)]
    for i in range(desired):
        assert made.report(feeder(i), 1)
    return made


def test_a_feeder_is_listed_from_its_report_to_the_end_of_its_connection():
    made = feeders(2)
    made.step(0)
    assert names(made) == []
    made.report(feeder(1), 1)
    assert names(made) == ["feeder-1"]
    made.leave("feeder-1", "1x", 2)
    assert names(made) == []
    made.report(feeder(1, "y"), 3)
    assert [e.instance for e in made.listed()] == ["1y"]


def test_the_end_of_an_old_process_does_not_unlist_the_new_one():
    made = ready(1)
    made.report(feeder(0, "y"), 2)
    made.leave("feeder-0", "0x", 3)
    assert [e.instance for e in made.listed()] == ["0y"]


def test_unreported_feeder_is_killed_and_placed_with_growing_delays():
    made = feeders(1)
    made.step(0)
    now, delays = 0.0, []
    for _ in range(7):
        now += 100
        assert made.step(now) == [Kill(0)]
        killed = now
        while not (instructions := made.step(now)):
            now += 0.5
        assert instructions == [FeederPlace(0)]
        delays.append(now - killed)
    assert delays == [1, 2, 4, 8, 16, 30, BACKOFF.last_s]
    assert "had not reported 100 s after it was placed" in made.notes()[0]


def test_reason_for_a_missing_report_is_reported():
    made = feeders(1)
    made.step(0)
    made.explain(0, "no node has room")
    assert made.notes() == ["feeder-0: no node has room"]
    made.step(100)
    assert made.notes() == [
        "feeder-0: had not reported 100 s after it was placed; restarting it (no node has room)"
    ]


def test_cause_that_a_restart_does_not_fix_stays_until_the_feeder_reports():
    made = feeders(1)
    made.step(0)
    made.failed(0, "no torch", 5, Cause.FAILS)
    assert made.step(7) == [FeederPlace(0)]
    made.explain(0, "it has room", Cause.STARTS)
    assert (made.members[0].cause, made.notes()) == (Cause.FAILS, ["feeder-0: no torch"])
    made.step(107)
    assert made.notes() == ["feeder-0: no torch"], "also when it is late"
    made.step(110)
    made.explain(0, "nodes are full", Cause.NO_ROOM)
    assert made.members[0].cause is Cause.NO_ROOM
    made.report(feeder(0), 111)
    assert (made.members[0].cause, made.notes()) == (None, [])


def test_lost_feeder_given_up_by_ray_is_placed_again_at_once():
    made = ready(1)
    made.leave("feeder-0", "0x", 10)
    made.explain(0, "it has room", Cause.STARTS)
    assert made.members[0].cause is Cause.LOST
    made.failed(0, "too slow", 12, Cause.REGISTER_TIMEOUT)
    assert made.step(13) == [FeederPlace(0)]
    assert made.members[0].cause is Cause.REGISTER_TIMEOUT


def test_feeder_refused_by_ray_is_placed_again_later():
    made = feeders(1)
    made.step(0)
    made.failed(0, "the name is taken", 1)
    assert made.step(1.5) == []
    assert made.step(2) == [FeederPlace(0)]


def test_lost_feeder_has_the_usual_time_to_return():
    made = ready(1)
    made.leave("feeder-0", "0x", 10)
    assert made.step(109) == []
    assert made.step(110) == [Kill(0)]


def test_surplus_feeders_are_unlisted_then_drained_then_killed():
    made = ready(3)
    made.scale(1)
    assert made.step(10) == [Drain(feeder(1)), Drain(feeder(2))]
    assert names(made) == ["feeder-0"]
    made.drained("feeder-1", "1x", 12)
    assert made.step(12) == [Kill(1)]
    assert made.step(19.9) == []
    assert made.step(20) == [Kill(2)], "its time to drain is over"


def test_drained_feeder_stays_briefly_for_receivers_with_an_old_list():
    made = ready(1)
    made.scale(0)
    made.step(10)
    made.drained("feeder-0", "0x", 10.1)
    assert made.step(10.4) == []
    assert made.step(10.6) == [Kill(0)]


def test_draining_feeder_that_is_wanted_again_is_kept():
    made = ready(2)
    made.scale(1)
    made.step(10)
    made.scale(2)
    assert made.step(11) == []
    assert names(made) == ["feeder-0", "feeder-1"]
    assert made.step(1000) == []


@pytest.mark.parametrize("state", [FeederState.PLACING, FeederState.LOST, FeederState.BACKOFF])
def test_unready_feeder_no_longer_wanted_is_killed_at_once(state: FeederState):
    made = ready(1)
    if state is not FeederState.LOST:
        made = feeders(1)
        made.step(0)
    if state is FeederState.BACKOFF:
        made.failed(0, "no", 1)
    if state is FeederState.LOST:
        made.leave("feeder-0", "0x", 1)
    assert made.members[0].state is state
    made.scale(0)
    assert made.step(1) == [Kill(0)]
    assert made.members == {}


def test_hanging_feeder_is_killed_and_placed_again():
    made = ready(1)
    assert made.replace("feeder-0", "another", "late", 5) == []
    assert made.replace("feeder-0", "0x", "late", 5) == [Kill(0)]
    assert names(made) == []
    assert made.notes() == ["feeder-0: replaced: late"]
    assert not made.report(feeder(0), 5.5), "it is being killed"
    assert made.step(6) == [FeederPlace(0)]


def test_feeders_of_an_earlier_supervisor_are_adopted_and_strays_killed():
    made = feeders(2)
    made.adopt(0, 0)
    assert made.report(feeder(0), 1)
    assert made.report(feeder(1), 1), "it reported before it was looked for"
    assert not made.report(feeder(7), 1)
    assert made.step(2) == [Kill(7)]
    assert names(made) == ["feeder-0", "feeder-1"]


def test_feeder_numbers_are_parsed_only_from_valid_names():
    assert [index_of(n) for n in ("feeder-0", "feeder-12", "feeder-012", "feeder-", "x-1", "feeder--1")] == [
        0, 12, None, None, None, None,
    ]  # fmt: skip


EVENTS = st.one_of(
    st.tuples(st.just("scale"), st.integers(0, 4)),
    st.tuples(st.just("report"), st.integers(0, 5), st.sampled_from("xy")),
    st.tuples(st.just("leave"), st.integers(0, 5), st.sampled_from("xy")),
    st.tuples(st.just("drained"), st.integers(0, 5), st.sampled_from("xy")),
    st.tuples(st.just("replace"), st.integers(0, 5), st.sampled_from("xy")),
    st.tuples(st.just("failed"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.floats(0, 120)),
)


@given(st.lists(EVENTS, max_size=60))
def test_any_events_end_with_exactly_the_wanted_feeders(events: list[tuple]):
    made, now = feeders(2), 0.0
    placed: set[int] = set()

    def step() -> None:
        for instruction in made.step(now):
            if isinstance(instruction, FeederPlace):
                placed.add(instruction.index)
            elif isinstance(instruction, Kill):
                placed.discard(instruction.index)

    for kind, *rest in events:
        now += 0.1
        if kind == "scale":
            made.scale(rest[0])
        elif kind == "wait":
            now += rest[0]
        elif kind == "report":
            made.report(feeder(*rest), now)
        elif kind == "failed":
            made.failed(rest[0], "no", now)
        elif kind == "replace":
            e = feeder(*rest)
            made.replace(e.name, e.instance, "late", now)
        else:
            e = feeder(*rest)
            getattr(made, kind)(e.name, e.instance, now)
        step()
        assert all(index_of(e.name) < made.desired for e in made.listed())
    for _ in range(10):
        now += 60
        step()
        for member in list(made.members.values()):
            made.report(feeder(member.index), now)
    assert names(made) == [name_of(i) for i in range(made.desired)]


def guest(index: int, session: str, instance: str = "g") -> Endpoint:
    return feeder(index, instance)._replace(session=session)


def test_feeders_of_a_lost_cluster_serve_until_their_successors_report():
    made = feeders(2)
    made.opened("new", 0)
    assert made.report(guest(0, "old"), 1)
    assert made.report(guest(1, "old"), 1)
    assert made.step(1) == [FeederPlace(0), FeederPlace(1)], "guests are no members"
    assert names(made) == ["feeder-0", "feeder-1"]
    made.report(guest(0, "new", "n"), 2)
    assert [e.instance for e in made.listed()] == ["0n", "1g"]
    made.leave("feeder-1", "1g", 3)
    assert [e.instance for e in made.listed()] == ["0n"]
    assert made.members[1].state is FeederState.PLACING, "the end of a guest is nothing to its successor"


def test_feeder_reporting_before_ray_answers_is_adopted_by_its_cluster():
    made = feeders(1)
    made.report(guest(0, "same"), 1)
    assert names(made) == ["feeder-0"]
    made.opened("same", 2)
    assert made.step(2) == []
    assert made.members[0].state is FeederState.READY
    made.leave("feeder-0", "0g", 3)
    assert names(made) == []


def test_guests_are_listed_up_to_the_wanted_number_while_they_answer():
    made = feeders(1)
    made.opened("new", 0)
    made.report(guest(0, "old"), 1)
    made.report(guest(1, "old"), 1)
    assert names(made) == ["feeder-0"]
    assert made.replace("feeder-0", "0g", "hangs", 2) == []
    assert names(made) == []


def test_repeated_out_of_memory_kills_of_a_feeder_are_reported():
    made = ready(1)
    made.trouble(0, Cause.OUT_OF_MEMORY, "ran out of memory at index 3", 10)
    version = made.version
    assert made.notes() == ["feeder-0: ran out of memory at index 3"]
    assert made.out_of_memory() == ["feeder-0"]
    for now in range(20, 200, 20):  # it serves, is killed, and comes back
        made.leave("feeder-0", f"0{now}" if now > 20 else "0x", now)
        made.explain(0, "Ray starts it again", Cause.FAILS)
        made.trouble(0, Cause.OUT_OF_MEMORY, f"ran out of memory at index {now}", now)
        assert made.notes() == ["feeder-0: ran out of memory at index 3"], now
        made.report(feeder(0, str(now + 20)), now + 5)
        assert made.notes() == ["feeder-0: ran out of memory at index 3"], now
        made.step(now + 10)
    assert made.next_deadline == 180 + TROUBLE_S
    made.step(made.next_deadline)
    assert (made.notes(), made.out_of_memory(), made.version > version) == ([], [], True)


def test_reason_for_a_missing_feeder_precedes_its_out_of_memory():
    made = ready(1)
    made.trouble(0, Cause.OUT_OF_MEMORY, "ran out of memory", 10)
    made.leave("feeder-0", "0x", 11)
    made.explain(0, "no node has room", Cause.NO_ROOM)
    assert made.notes() == ["feeder-0: no node has room"]
    assert made.out_of_memory() == []
    made.trouble(7, Cause.OUT_OF_MEMORY, "of a feeder that is none of ours", 12)
    assert made.notes() == ["feeder-0: no node has room"]


def test_missing_feeder_is_reported_before_a_killed_one_that_serves():
    serves = {"name": "feeder-0", "state": "ready", "cause": Cause.OUT_OF_MEMORY, "why": "ran out of memory"}
    misses = {"name": "feeder-1", "state": "placing", "cause": Cause.NO_ROOM, "why": "no node has room"}
    assert worst([serves, misses]) == misses
    assert worst([serves]) == serves


@pytest.mark.parametrize("session", ["", "another"], ids=["member", "guest"])
@pytest.mark.parametrize("left", [False, True], ids=["connected", "lost"])
def test_report_with_the_instance_of_another_feeder_is_refused(session: str, left: bool):
    """Receivers tell processes apart by instance: the report would take the place of the other one's."""
    made = ready(2)
    if left:
        made.leave("feeder-0", "0x", 2)
    before = made.listed()
    assert not made.report(feeder(1)._replace(instance="0x", session=session), 3)
    assert made.listed() == before
    assert made.report(feeder(0), 4), "that feeder itself reconnects"


def test_report_with_the_instance_of_a_guest_is_refused():
    made = ready(2)
    guest = Endpoint("feeder-7", "g", "127.0.0.1", 7, session="another")
    assert made.report(guest, 1)
    assert not made.report(feeder(1)._replace(instance="g"), 2)
    assert not made.report(feeder(1)._replace(instance="g", session="third"), 2)
    assert made.report(guest, 3), "that feeder itself reconnects"
