"""Why feeders do not come, from what Ray says of their actors. Time is an argument."""

from __future__ import annotations

import pytest

from dataloaderjob.core.supervision import Cause
from dataloaderjob.providers.ray.placement import JOIN_S, Explainer, Life, Room, monitor_text

PENDING = Life("PENDING_CREATION", registered=False)
STARTUP = "Could not create the actor because worker startup repeatedly failed. Failed to startup worker after retrying"
FULL = "feeder: 1 needed, 0 of 1 free"


def causes(explainer: Explainer, lives: dict[int, Life], room: Room, now: float = 0, taken: int = 0):
    return [why.cause for why in explainer.explain(lives, lives, room, taken=taken, now=now)]


@pytest.mark.parametrize(
    ("life", "cause", "text", "dead"),
    [
        pytest.param(PENDING, Cause.STARTS, "not registered with Ray yet", False, id="it starts"),
        pytest.param(
            Life("PENDING_CREATION", registered=True), Cause.STARTS, "has not reported yet", False, id="imports"
        ),
        pytest.param(
            Life("RESTARTING", registered=False, restarts=3), Cause.FAILS, "output of its pod", False, id="crashes"
        ),
        pytest.param(
            Life("DEAD", registered=True, death="ModuleNotFoundError: No module named 'torch'"),
            Cause.FAILS, "failed at its start: ModuleNotFoundError: No module named 'torch'", True, id="raises",
        ),
        pytest.param(
            Life("DEAD", registered=False, death=STARTUP), Cause.REGISTER_TIMEOUT,
            "worker_register_timeout, 30 s; Ray ends each one and starts another: raise "
            "spec.ray.managed.tuning.workerRegisterTimeoutSeconds", True, id="never registers",
        ),
    ],
)  # fmt: skip
def test_cause_follows_from_rays_actor_state(life: Life, cause: Cause, text: str, dead: bool):
    (why,) = Explainer(30).explain([0], {0: life}, Room(1, FULL), taken=0, now=0)
    assert (why.cause, why.dead) == (cause, dead)
    assert text in why.text


def test_feeder_that_holds_the_last_place_does_not_lack_room():
    assert causes(Explainer(30), {0: PENDING}, Room(1, FULL)) == [Cause.STARTS]
    both = Explainer(30)
    causes(both, {0: PENDING, 1: PENDING}, Room(1, FULL))
    assert causes(both, {0: PENDING, 1: PENDING}, Room(1, FULL), JOIN_S) == [Cause.STARTS, Cause.NO_ROOM]
    late = Explainer(30)
    (why,) = late.explain([1], {1: PENDING}, Room(1, FULL), taken=1, now=0)
    assert why.text == f"no Ray node has room for it yet ({FULL})", "nodes may be about to join"
    (why,) = late.explain([1], {1: PENDING}, Room(1, FULL), taken=1, now=JOIN_S)
    assert why.text == f"no node has room ({FULL}): add nodes or lower the number of feeders"


def test_time_without_room_does_not_count_as_time_to_register():
    """Others take its room after a second, for longer than registering may take."""
    explainer, free = Explainer(30), Room(1, FULL)
    assert causes(explainer, {0: PENDING}, free, now=0) == [Cause.STARTS]
    assert causes(explainer, {0: PENDING}, free, now=1, taken=1) == [Cause.STARTS]
    assert causes(explainer, {0: PENDING}, free, now=100, taken=1) == [Cause.NO_ROOM]
    assert causes(explainer, {0: PENDING}, free, now=101) == [Cause.STARTS]
    assert causes(explainer, {0: PENDING}, free, now=200) == [Cause.REGISTER_TIMEOUT]


def test_feeder_with_a_process_holds_its_place_before_it_reports():
    lives, explainer = {0: Life("PENDING_CREATION", registered=True), 1: PENDING}, Explainer(30)
    causes(explainer, lives, Room(1, FULL))
    assert causes(explainer, lives, Room(1, FULL), JOIN_S) == [Cause.STARTS, Cause.NO_ROOM]


def test_the_timeout_counts_from_when_there_is_room():
    explainer = Explainer(2)
    for now, cause in ((0, Cause.STARTS), (JOIN_S - 1, Cause.STARTS), (100, Cause.NO_ROOM)):
        assert causes(explainer, {0: PENDING}, Room(0, "no pod yet"), now) == [cause], now
    for now in (101, 103.9):
        assert causes(explainer, {0: PENDING}, Room(1, ""), now) == [Cause.STARTS]
    assert causes(explainer, {0: PENDING}, Room(1, ""), 105) == [Cause.REGISTER_TIMEOUT]


def test_node_about_to_join_does_not_count_as_lack_of_room():
    explainer = Explainer(30)
    assert causes(explainer, {0: PENDING}, Room(0, FULL), 0) == [Cause.STARTS]
    assert causes(explainer, {0: PENDING}, Room(1, ""), 9) == [Cause.STARTS]
    assert causes(explainer, {0: PENDING}, Room(0, FULL), 11) == [Cause.STARTS], (
        "its node went, and may come back"
    )
    assert causes(explainer, {0: PENDING}, Room(0, FULL), 11 + JOIN_S) == [Cause.NO_ROOM]


def test_feeder_that_registered_meanwhile_starts_a_new_timeout():
    explainer = Explainer(2)
    assert causes(explainer, {0: PENDING}, Room(1, ""), 0) == [Cause.STARTS]
    assert causes(explainer, {}, Room(1, ""), 50) == []
    assert causes(explainer, {0: PENDING}, Room(1, ""), 100) == [Cause.STARTS]


def test_actor_unknown_to_ray_is_reported_as_starting():
    (why,) = Explainer(2).explain([3], {}, Room(9, ""), taken=0, now=0)
    assert (why.feeder, why.cause) == (3, Cause.STARTS)


def test_rays_memory_monitor_message_becomes_one_line_with_a_remedy():
    detail = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: 25e1) "
        "was 0.39GB used / 0.41GB limit (0.953679)\nOOM kill reason: Memory usage exceeded threshold"
    )
    assert monitor_text(detail, "spec.feeders.resources.limits.memory") == (
        "Ray's memory monitor killed its process because its node ran out of memory, with 0.39GB of 0.41GB in use: "
        "raise spec.feeders.resources.limits.memory, or make batches smaller"
    )
    assert monitor_text("words of a later Ray", "").endswith(
        "because its node ran out of memory: use fewer feeders or smaller batches, or free some memory"
    )
