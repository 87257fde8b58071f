"""Deadlines for batches of an attached pod, which may wait for its first feeder for any time, in virtual time."""

import json

import pytest
from world import World

from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher


def failure(world: World) -> dict[str, str]:
    (text,) = set(world.failed.values())
    return dict(json.loads(text))


def attached(deadline_s: float = 30.0) -> World:
    return World(1, deadline_s=deadline_s, awaits_feeders=True)


def test_pod_that_attached_early_waits_for_its_first_feeder() -> None:
    world = attached()
    trainer = world.open(1, 50)
    world.at(3600.0, world.add_feeder)
    world.run(lambda: trainer.done, 3700.0)
    assert (world.taken[1], world.failed) == (list(range(50)), {})
    assert "no feeder is connected" in world.notes[0]
    assert "its deadline starts with the first feeder" in world.notes[0]
    assert 60 < len(world.notes) < 150, "told each half minute"


def test_first_feeder_starts_the_deadline() -> None:
    """The feeder hangs: the wait before it does not count, and the wait for it does."""
    world = attached()
    world.open(1, 50)
    world.at(600.0, lambda: world.add_feeder(1e6))
    world.run(lambda: bool(world.failed), 700.0)
    assert failure(world)["service"] == "DeadlineExceeded"
    assert 629.0 < world.now < 650.0


def test_feeders_lost_later_fail_the_batch_at_its_deadline() -> None:
    world = attached()
    feeder = world.add_feeder()
    world.open(1, 500, step_s=0.1)
    world.at(5.0, lambda: world.kill(feeder))
    world.run(lambda: bool(world.failed), 100.0)
    assert 30.0 < world.now < 60.0


def test_pods_of_other_jobs_wait_no_longer_than_before() -> None:
    world = World(1, deadline_s=30.0)
    world.open(1, 50)
    world.run(lambda: bool(world.failed), 100.0)
    assert world.now == pytest.approx(30.0, abs=1.0)
    assert failure(world)["service"] == "DeadlineExceeded"


def test_end_of_the_job_ends_the_wait_of_a_pod_that_outlives_it() -> None:
    world = attached()
    world.open(1, 50)
    world.at(100.0, lambda: end(world.machine))
    world.run(lambda: bool(world.failed), 200.0)
    assert world.now == pytest.approx(100.0, abs=1.0)
    assert failure(world)["service"] == "ServiceUnavailable"
    assert "the job has ended: StartupDeadlineExceeded" in failure(world)["message"]


def end(machine: Dispatcher) -> None:
    machine.ended = "StartupDeadlineExceeded: feeders were not up within 900 s"
