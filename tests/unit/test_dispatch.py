"""The dispatcher in a simulated world: order, space and lateness under faults, in virtual time."""

import json
import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from world import World

from dataloaderjob.core import errors
from dataloaderjob.core.frames import TICKET_DEPTH, FrameKind, Header
from dataloaderjob.feeder.bundles import is_due
from dataloaderjob.sidecar.dispatch.dispatcher import LOAD_AGAIN, MAX_LOADS


def finish(world, *trainers, limit_s=600.0):
    world.run(lambda: all(t.done and not t.held for t in trainers), limit_s)


def test_batches_arrive_in_order_whoever_makes_them():
    world = World(1)
    for pace in (0.001, 0.02, 0.2):
        world.add_feeder(pace)
    trainer = world.open(1, 200)
    finish(world, trainer)
    assert world.taken[1] == list(range(200))
    assert not world.machine.placer.lent


def test_the_least_busy_feeder_gets_the_work():
    world = World(2)
    fast, slow = world.add_feeder(0.01), world.add_feeder(0.1)
    counts = {fast.endpoint.instance: 0, slow.endpoint.instance: 0}
    body = world._body

    def counted(feeder, key):
        counts[feeder.endpoint.instance] += 1
        body(feeder, key)

    world._body = counted
    finish(world, world.open(1, 200, window=16))
    assert counts[fast.endpoint.instance] > 4 * counts[slow.endpoint.instance]


def test_killed_feeder_costs_only_time():
    world = World(3)
    first = world.add_feeder()
    world.add_feeder()
    trainer = world.open(1, 100)
    world.at(0.2, lambda: world.kill(first))
    finish(world, trainer)
    assert world.machine.counters.feeders_lost == 1
    assert max(world.waits) < 0.2


@pytest.mark.parametrize("when", [0.1, 0.2, 0.203, 0.31])
def test_frozen_feeder_delays_the_trainer_by_less_than_three_seconds(when):
    world = World(4)
    frozen = world.add_feeder()
    world.add_feeder()
    trainer = world.open(1, 300)
    world.at(when, lambda: setattr(frozen, "frozen", True))
    finish(world, trainer)
    assert max(world.waits) < 3.0


def test_thawed_feeder_resumes_work_and_its_late_copies_are_dropped():
    world = World(5)
    frozen = world.add_feeder()
    world.add_feeder()
    trainer = world.open(1, 800, step_s=0.01)
    world.at(0.2, lambda: setattr(frozen, "frozen", True))
    world.at(5.0, lambda: setattr(frozen, "frozen", False))
    finish(world, trainer)
    state = world.machine.feeders[frozen.endpoint.instance]
    assert state.up
    assert state.suspect_since is None


def test_a_frozen_feeder_is_reported_for_replacement():
    world = World(6)
    frozen = world.add_feeder()
    world.add_feeder()
    trainer = world.open(1, 5000, step_s=0.02)
    world.at(0.2, lambda: setattr(frozen, "frozen", True))
    world.run(lambda: world.replaced)
    assert world.replaced[0][0] == frozen.endpoint.name
    trainer.stop()


def test_new_feeder_takes_over_if_all_others_are_frozen():
    world = World(7)
    feeders = [world.add_feeder(), world.add_feeder()]
    trainer = world.open(1, 200, step_s=0.01)
    for feeder in feeders:
        world.at(0.3, lambda f=feeder: setattr(f, "frozen", True))
    world.at(10.0, world.add_feeder)
    finish(world, trainer)
    assert max(world.waits) < 14.0


def test_paused_trainer_causes_no_failures_or_retries():
    world = World(8, deadline_s=30.0)
    world.add_feeder()
    world.add_feeder()
    trainer = world.open(1, 100)
    world.at(0.2, lambda: setattr(trainer, "paused", True))
    world.at(500.0, lambda: setattr(trainer, "paused", False))
    finish(world, trainer)
    assert not world.failed
    assert not world.replaced
    assert world.machine.counters.retries == 0


def test_retried_awaited_ticket_overtakes_later_ones_waiting_for_space():
    """Pool full of later batches, feeders full of later announcements, then the awaited one is lost."""
    world = World(9, limit=1 << 20, pool=6 * 4096 * 64)
    slow = world.add_feeder(5.0)
    world.add_feeder(0.001)
    trainer = world.open(1, 60, window=32, size=lambda r: 4096 * 64)
    world.at(2.0, lambda: world.kill(slow))
    finish(world, trainer)
    assert world.taken[1] == list(range(60))


def test_two_iterators_share_the_pool_and_neither_blocks_the_other():
    world = World(10, pool=12 * 4096)
    world.add_feeder(0.005)
    one = world.open(1, 60, window=16, size=lambda r: 4096)
    two = world.open(2, 60, window=16, size=lambda r: 4096)
    two.paused = True
    world.at(5.0, lambda: setattr(two, "paused", False))
    finish(world, one, two)
    assert max(world.waits[:60]) < 1.0


def test_waiting_iterator_is_served_despite_a_paused_ones_announcements():
    world = World(21, limit=1 << 20, pool=4 * 4096)
    world.add_feeder(0.01)
    paused = world.open(1, 60, window=16, size=lambda r: 4096)
    paused.paused = True
    world.run(
        lambda: sum(len(state.attempts) for state in world.machine.feeders.values()) == 2 and world.now > 5.0
    )
    awake = world.open(2, 60, window=16, size=lambda r: 4096)
    world.run(lambda: awake.done, 60.0)
    assert max(world.waits) < 1.0
    paused.stop()


def test_body_larger_than_its_room_is_dropped_and_requested_with_more_room():
    world = World(22)
    feeder = world.add_feeder(0.05)
    trainer = world.open(1, 20, size=lambda r: 4096)
    world.run(lambda: len(world.taken[1]) == 5)
    state = world.machine.feeders[feeder.endpoint.instance]
    key, attempt = next((k, a) for k, a in state.attempts.items() if a.extent is not None)
    late = world._header(FrameKind.BODY, key, nbytes=attempt.extent.nbytes + 1)
    assert world.machine.begin_body(world.now, feeder.endpoint.instance, late) is None
    assert world.machine.counters.late_copies == 1
    world.carry_out()
    assert state.attempts[key].extent.nbytes >= late.nbytes
    finish(world, trainer)
    assert world.taken[1] == list(range(20))


@pytest.mark.parametrize("seed", range(40))
def test_trainer_that_keeps_one_batch_never_waits_for_space(seed):
    world = World(seed, pool=6 * 4096, limit=64 * 4096)
    for _ in range(1 + seed % 3):
        world.add_feeder(0.003)
    trainer = world.open(1, 80, window=16, size=lambda r: r.randint(1, 3 * 4096), hold=-1)
    finish(world, trainer)
    assert max(world.waits) < 2.0


def test_the_memory_limit_holds_while_the_trainer_is_paused():
    limit = 1 << 20
    world = World(18, limit=limit)
    for _ in range(4):
        world.add_feeder(0.003)
    trainer = world.open(1, 60, window=32, size=lambda r: 300_000)
    trainer.paused = True
    world.at(60.0, lambda: setattr(trainer, "paused", False))
    most = 0

    def done():
        nonlocal most
        most = max(most, world.machine.placer.space.total_nbytes)
        return trainer.done and not trainer.held

    world.run(done)
    assert most <= limit


def test_draining_feeder_that_dies_with_work_is_forgotten():
    world = World(19)
    first = world.add_feeder(0.05)
    world.add_feeder(0.05)
    trainer = world.open(1, 60)
    world.run(lambda: len(world.taken[1]) > 5)
    world.unlist(first)
    world.kill(first)
    finish(world, trainer)
    assert first.endpoint.instance not in world.machine.feeders


def test_slow_bodies_in_progress_are_waited_for():
    """Many feeders share one network: a body that takes long is not one that stopped."""
    world = World(20)
    feeder = world.add_feeder(0.001)
    trainer = world.open(1, 4)
    end = world._body_end

    def slow_end(feeder, header, left=40):
        if left:
            world.machine.moved(world.now, feeder.endpoint.instance)
            world.at(0.2, lambda: slow_end(feeder, header, left - 1))
        else:
            end(feeder, header)

    world._body_end = slow_end
    finish(world, trainer)
    assert world.machine.counters.feeders_lost == 0
    assert feeder is not None


def test_an_early_break_frees_everything():
    world = World(11)
    world.add_feeder()
    for n in range(1, 40):
        trainer = world.open(n, 1000)
        world.run(lambda t=trainer, n=n: len(world.taken[n]) >= 3)
        trainer.stop()
    world.run(lambda: not world.machine.placer.lent)
    assert len(world.machine.placer.space.arenas) <= 2
    assert world.machine.placer.space.used_nbytes == 0


def test_a_batch_above_the_limit_is_refused_by_name():
    world = World(12, limit=1 << 20)
    world.add_feeder()
    trainer = world.open(1, 3, size=lambda r: 2 << 20)
    finish(world, trainer)
    message = json.loads(world.failed[1, 0])
    assert message["service"] == "InputError"
    assert "2.1 MB" in message["message"]
    assert "spec.loader.memoryPerProcess" in message["message"]


def test_a_batch_that_kills_every_feeder_is_named():
    world = World(13)
    for _ in range(8):
        world.add_feeder()
    world.deadly.add((1, 5))
    trainer = world.open(1, 20)
    world.run(lambda: trainer.done)
    message = json.loads(world.failed[1, 5])
    assert message["service"] == "FeederLost"
    assert "3 feeder processes died, each" in message["message"]
    assert sum(f.dead for f in world.feeders.values()) == 4
    assert list(world.failed) == [(1, 5)]


def test_links_breaking_within_a_body_are_not_blamed_on_the_batch():
    world = World(16)
    for _ in range(3):
        world.add_feeder()
    body, cuts = world._body, []

    def cut(feeder, key):
        body(feeder, key)
        instance = feeder.endpoint.instance
        header, _ = world.receiving.get(instance, (None, None))
        if key == (1, 5) and header is not None and header.ticket == 5 and len(cuts) < 8:
            cuts.append(world.receiving.pop(instance))
            world.machine.feeder_down(world.now, instance, "it closed the link within a frame")
            world.at(0.1, lambda: world._retry(feeder))

    world._body = cut
    trainer = world.open(1, 20)
    finish(world, trainer)
    assert len(cuts) == 8
    assert (world.taken[1], world.failed) == (list(range(20)), {})


def test_batch_that_hangs_everywhere_fails_at_the_deadline():
    world = World(14, deadline_s=60.0)
    for _ in range(4):
        world.add_feeder().hung.add(50)
    trainer = world.open(1, 100)
    world.run(lambda: trainer.done)
    message = json.loads(world.failed[1, 50])
    assert message["service"] == "DeadlineExceeded"
    assert "feeder-" in message["message"]
    assert any("has been waiting for" in n for n in world.notes)
    assert list(world.failed) == [(1, 50)]

    assert not world.replaced, "feeders end the process that hangs, and go on"


def test_deadline_does_not_run_while_the_trainer_computes():
    """It waits for the first batch, computes for 200 s, and then waits for a batch that hangs."""
    world = World(14, deadline_s=60.0)
    world.add_feeder().hung.add(1)
    trainer = world.open(1, 20, step_s=200.0)
    world.run(lambda: bool(world.failed) or trainer.done)
    assert list(world.failed) == [(1, 1)]
    assert 255.0 < world.now < 270.0


def test_batch_that_kills_three_builders_fails_and_loses_no_feeder():
    world = World(18)
    for _ in range(3):
        world.add_feeder()
    world.poison.add((1, 5))
    trainer = world.open(1, 40)
    world.run(lambda: trainer.done)
    message = json.loads(world.failed[1, 5])
    assert message["service"] == "FeederLost"
    assert "3 feeder processes died, each while making" in message["message"]
    assert "why" in message["message"]
    assert list(world.failed) == [(1, 5)]
    assert all(state.up for state in world.machine.feeders.values())


def test_batch_that_exhausts_memory_in_three_builders_fails_as_such():
    world = World(18)
    for _ in range(3):
        world.add_feeder()
    world.poison.add((1, 5))
    world.hungry.add((1, 5))
    trainer = world.open(1, 40)
    world.run(lambda: trainer.done)
    message = json.loads(world.failed[1, 5])
    assert message["service"] == "OutOfMemory"
    assert re.fullmatch(
        r"3 feeder processes ended while making .* of batch 5 \(feeder-\d: it why\)",
        message["message"],
    )
    assert issubclass(errors.named("OutOfMemory"), errors.FeederLost), "who catches that gets this too"


def test_late_report_of_out_of_memory_replaces_feeder_lost():
    world = World(13)
    for _ in range(8):
        world.add_feeder()
    world.deadly.add((1, 5))
    kill = world.kill

    def tell(name: str) -> None:
        world.machine.out_of_memory |= {name}
        world.machine.supervisor_notes = [f"{n}: its pod may use 1 MiB" for n in world.machine.out_of_memory]

    def killed(feeder) -> None:
        kill(feeder)
        world.at(0.5, lambda: tell(feeder.endpoint.name))

    world.kill = killed
    trainer = world.open(1, 20)
    world.run(lambda: trainer.done)
    message = json.loads(world.failed[1, 5])
    assert message["service"] == "OutOfMemory"
    assert re.search(r"\(feeder-\d: its pod may use 1 MiB\)", message["message"])


def test_crash_among_out_of_memory_ends_is_reported_as_feeder_lost():
    world = World(18)
    for _ in range(3):
        world.add_feeder()
    world.poison.add((1, 5))
    lost, times = world._lost, []

    def one_crashes(feeder, key) -> None:
        times.append(key)
        world.hungry = {key} if len(times) > 1 else set()
        lost(feeder, key)

    world._lost = one_crashes
    trainer = world.open(1, 40)
    world.run(lambda: trainer.done)
    assert json.loads(world.failed[1, 5])["service"] == "FeederLost"


def test_a_bundle_that_some_feeders_cannot_load_is_made_by_the_others():
    world = World(19)
    feeders = [world.add_feeder() for _ in range(6)]
    for feeder in feeders[:2]:
        feeder.unloadable = True
    finish(world, world.open(1, 60))
    assert not world.failed
    assert [feeder.made for feeder in feeders[:2]] == [0, 0]
    assert sum(feeder.refused for feeder in feeders[:2]) <= 2 * TICKET_DEPTH, (
        "they are not asked again at once"
    )


def test_feeder_that_failed_to_load_a_bundle_is_retried_later():
    world = World(22)
    late, _ = world.add_feeder(), world.add_feeder()
    late.unloadable = True
    trainer = world.open(1, 1500, step_s=0.1)
    world.run(lambda: late.refused)
    late.unloadable = False  # its mount is there now
    until = world.now + LOAD_AGAIN.first_s / 2
    world.run(lambda: world.now > until)
    assert late.made < TICKET_DEPTH, "but for what it had in hand"
    world.run(lambda: late.made > 100, limit_s=200.0)
    finish(world, trainer)
    assert not world.failed


def test_bundle_that_three_feeders_cannot_load_fails_with_their_failure():
    world = World(20)
    feeders = [world.add_feeder() for _ in range(6)]
    for feeder in feeders:
        feeder.unloadable = True
    trainer = world.open(1, 1)
    world.run(lambda: trainer.done)
    assert world.failed == {(1, 0): b"why"}
    assert [feeder.refused for feeder in feeders].count(1) == MAX_LOADS, "each of these was asked once"


def test_bundle_that_no_feeder_can_load_fails_though_loading_is_slow():
    world = World(23, deadline_s=1e6)
    for load_s in (100.0, 135.0):  # longer apart than a feeder is left alone
        feeder = world.add_feeder()
        feeder.unloadable, feeder.load_s = True, load_s
    world.open(1, 3)
    world.run(lambda: world.failed)
    assert world.now < 300.0


def test_feeders_release_a_bundle_when_its_last_stream_ends():
    world = World(21)
    feeders = [world.add_feeder() for _ in range(2)]
    first, second = world.open(1, 30), world.open(2, 600, step_s=0.01)
    world.run(lambda: first.done)
    until = world.now + 0.5
    world.run(lambda: world.now > until)
    assert not any(feeder.released for feeder in feeders), "the second stream uses it"
    world.run(lambda: second.done)
    world.machine.close_stream(world.now, 2, 600)
    until = world.now + 0.5
    world.run(lambda: world.now > until)
    assert [feeder.released for feeder in feeders] == [[bytes(16)]] * 2


def test_missing_feeders_are_reported_before_the_error():
    world = World(15, deadline_s=60.0)
    trainer = world.open(1, 3)
    world.run(lambda: trainer.done)
    assert "no feeder is connected" in json.loads(world.failed[1, 0])["message"]
    assert any("no feeder is connected" in n for n in world.notes)


def test_hedges_stay_within_their_budget():
    world = World(16)
    for _ in range(4):
        world.add_feeder(0.01)
    laggard = world.add_feeder(0.4)
    trainer = world.open(1, 2000, window=8, step_s=0.001)
    finish(world, trainer)
    assert laggard is not None
    assert 0 < world.machine.counters.hedges <= 1 + 0.05 * 2000


def test_uniformly_slow_feeders_cause_few_retries():
    world = World(17)
    feeders = [world.add_feeder(0.01) for _ in range(4)]
    trainer = world.open(1, 400)

    def slow_down():
        for feeder in feeders:
            feeder.pace_s = 5.0

    world.at(0.3, slow_down)
    world.run(lambda: len(world.taken[1]) > 200, 2000.0)
    assert world.machine.counters.retries <= 8
    trainer.stop()


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 10**6),
    feeders=st.integers(1, 5),
    streams=st.integers(1, 3),
    window=st.integers(1, 20),
    largest=st.integers(1, 40),
    pool=st.one_of(st.none(), st.integers(2, 60)),
    hold=st.integers(-1, 4),
    faults=st.lists(
        st.tuples(st.sampled_from(["kill", "freeze", "add", "drain", "break"]), st.floats(0.01, 3.0)),
        max_size=6,
    ),
)
def test_every_ticket_is_served_once_in_order_and_no_byte_is_lost(
    seed, feeders, streams, window, largest, pool, hold, faults
):
    world = World(seed, limit=4096 * 4000, pool=None if pool is None else pool * 4096)
    for _ in range(feeders):
        world.add_feeder(world.random.choice([0.001, 0.01, 0.05]))

    def size(r):
        return r.randint(1, largest * 4096)

    trainers = [
        world.open(n, 60, window=window, size=size, step_s=0.002, hold=hold) for n in range(1, streams + 1)
    ]

    def fault(kind):
        alive = [f for f in world.feeders.values() if not f.dead and f.endpoint in world.listed]
        if kind == "add" or len(alive) < 2:
            world.add_feeder()
        elif kind == "kill":
            world.kill(world.random.choice(alive))
        elif kind == "freeze":
            world.random.choice(alive[1:]).frozen = True
        elif kind == "drain":
            world.unlist(world.random.choice(alive))
        elif kind == "break":
            trainers[-1].stop()

    for kind, when in faults:
        world.at(when, lambda k=kind: fault(k))
    world.at(5.0, world.add_feeder)
    finish(world, *trainers)
    for trainer in trainers:
        assert world.taken[trainer.stream] == list(range(len(world.taken[trainer.stream])))
    assert not world.failed
    world.run(lambda: not world.machine.placer.lent)
    reserved = [a for state in world.machine.feeders.values() for a in state.attempts.values()]
    assert not reserved
    assert world.machine.placer.space.used_nbytes == 0
    assert not world.machine.placer.space.singles


def test_simultaneous_loading_notes_are_reported_once():
    world = World(24)
    feeders = [world.add_feeder() for _ in range(8)]
    world.run(lambda: world.now > 1)

    def note(feeder, text: str) -> None:
        header = Header(FrameKind.NOTE, 0, 0, 0, 0, bytes(16), len(text), 0)
        world.machine.frame(world.now, feeder.endpoint.instance, header, text.encode())
        world.carry_out()

    for seconds in (2, 7, 14):
        for feeder in feeders:
            note(feeder, f"is loading user code and data (3.1 MB), since {seconds} s")
        note(feeders[3], "slot 3 of the dataset: something of its own")
        until = world.now + 5
        world.run(lambda until=until: world.now > until)
    told = [text.partition(": ")[2] for text in world.notes]
    assert told == [
        text
        for seconds in (2, 7, 14)
        for text in (
            f"is loading user code and data (3.1 MB), since {seconds} s",
            "slot 3 of the dataset: something of its own",
        )
    ]


def test_notes_about_an_ongoing_wait_become_rarer():
    told, noted_at = [], 0.0
    for now in range(1000, 1600):
        if is_due(float(now), 1000.0, noted_at):
            noted_at = float(now)
            told.append(now - 1000)
    assert told == [2, 7, 14, 28, 56, 112, 224, 448]
