"""Slots in the simulated world: who makes which, what moves them, and that each batch comes once, in order."""

from __future__ import annotations

import json

import pytest
from world import World

from dataloaderjob.core import frames, ticket_codec
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import TICKET_DEPTH, Flag, FrameKind
from dataloaderjob.core.ticket_codec import SlotTicket
from dataloaderjob.sidecar.dispatch.homes import GATHER_S, MAX_SLOTS, MOST_AGAIN
from dataloaderjob.sidecar.dispatch.instructions import End, Fail, SayThere, Send
from dataloaderjob.trainer.epochs.plans import Places
from dataloaderjob.trainer.session.slot_places import SlotPlace


class SlotWorld(World):
    """Its feeders make slots in order, and again from the start where they did not make a slot before."""

    def __init__(self, lengths: list[int], seed: int = 0, **more) -> None:
        super().__init__(seed, **more)
        self.lengths = lengths
        self.asked: dict[tuple[int, int], SlotPlace] = {}
        """What each ticket (stream, number) asks for."""
        self.at_feeder: dict[tuple[str, int, int], int] = {}
        """Batches made of (instance, stream, slot)."""
        self.homes: dict[int, list[str]] = {}
        """Feeders that were asked for each slot, in order."""
        self.remade = 0

    def _do(self, item) -> None:
        if isinstance(item, Send) and len(item.header) and item.header[3] == FrameKind.TICKET:
            header = frames.unpack_header(item.header, frames.FROM_RECEIVER)
            ticket = ticket_codec.unpack_slot_ticket(item.payload)
            homes = self.homes.setdefault(ticket.slot, [])
            if homes[-1:] != [item.instance]:
                homes.append(item.instance)
            assert (header.bundle, ticket.slot) in {
                (slot.bundle, n) for s in self.machine.streams.values() for n, slot in s.slots.of.items()
            }
        super()._do(item)

    def _finished(self, feeder, key) -> None:
        place = self.asked[key]
        at = (feeder.endpoint.instance, key[0], place.slot)
        made = self.at_feeder.get(at, 0)
        if place.number > made:  # those before it, unsent
            self.remade += place.number - made
        self.at_feeder[at] = max(made, place.number + 1)
        if place.number >= self.lengths[place.slot] and not feeder.dead and not feeder.frozen:
            feeder.building = None
            self._ended(feeder, key, self.lengths[place.slot])
            self._build(feeder)
            return
        super()._finished(feeder, key)

    def _ended(self, feeder, key, batches: int) -> None:
        state = self.machine.feeders.get(feeder.endpoint.instance)
        if state is not None and state.up:
            header = self._header(FrameKind.FAILED, key, flags=Flag.ENDED)
            self.machine.frame(self.now, feeder.endpoint.instance, header, frames.pack_end(batches))

    def open_slots(self, stream: int, *, window: int = 8, size: int = 12_288) -> SlotTrainer:
        workers = len(self.lengths)
        bundle = Bundle(blobs=(("0" * 64, 1),), workers=workers)
        self.machine.open_stream(
            stream, manifest=bundle.manifest(), bundle=bundle.id, facts={}, window=window
        )
        return SlotTrainer(self, stream, workers, window, size)


class SlotTrainer:
    """Takes the batches of all slots in torch's order."""

    def __init__(self, world: SlotWorld, stream: int, workers: int, window: int, size: int) -> None:
        self.world, self.stream, self.window, self.size = world, stream, window, size
        self.places = Places(workers)
        self.drawn = self.awaited = 0
        self.told = -1
        self.given: list[tuple[int, int]] = []
        self.done = False
        self.draw()
        world.at(0.0, self.next)

    def draw(self) -> None:
        world = self.world
        while (found := self.places.next(self.window)) is not None:
            key, place = (self.stream, self.drawn), found[0]
            world.asked[key], world.sizes[key] = place, self.size
            payload = ticket_codec.pack_slot_ticket(SlotTicket(1, place.number, place.slot, 4))
            self.drawn += 1
            world.machine.tickets(world.now, self.stream, [(key[1], payload)], self.awaited)

    def next(self) -> None:
        world, key = self.world, (self.stream, self.awaited)
        if self.awaited == self.drawn:
            self.done = True
            world.machine.close_stream(world.now, self.stream, self.awaited)
            return
        if key not in world.index and key not in world.failed:
            if self.told != self.awaited:
                self.told = self.awaited
                world.machine.tickets(world.now, self.stream, [], self.awaited, waiting=True)
            world.at(0.002, self.next)
            return
        place = world.asked[key]
        if key in world.failed:
            self.places.ended(place, json.loads(world.failed[key])["ended"])
        else:
            lease, _ = world.index.pop(key)
            self.places.there(place)
            self.given.append((place.number, place.slot))
            world.machine.leases_ended(world.now, [lease])
        self.awaited += 1
        self.draw()
        world.at(0.0, self.next)

    def finish(self, limit_s: float = 600.0) -> None:
        self.world.run(lambda: self.done, limit_s)
        order = sorted((n, s) for s, length in enumerate(self.world.lengths) for n in range(length))
        assert self.given == order
        assert not self.world.machine.placer.lent


def test_each_slot_stays_at_its_home_and_each_feeder_has_one():
    world = SlotWorld([30, 40, 20])
    for _ in range(3):
        world.add_feeder()
    world.open_slots(1).finish()
    assert sorted(len(homes) for homes in world.homes.values()) == [1, 1, 1]
    assert len({homes[0] for homes in world.homes.values()}) == 3
    assert world.remade == 0
    assert world.machine.counters.failures == 0  # that slots end is no failure


def test_slot_tickets_do_not_block_a_feeders_other_batches():
    """A slot's home has all that is asked of it at once, and may be waited for by what another stream brings."""
    world = SlotWorld([100])
    feeder = world.add_feeder(pace_s=1e6)
    world.open_slots(1, window=12)
    bundle = Bundle(blobs=(("1" * 64, 1),))
    world.machine.open_stream(2, manifest=bundle.manifest(), bundle=bundle.id, facts={}, window=12)
    state = world.machine.feeders[feeder.endpoint.instance]
    world.run(lambda: len(state.attempts) == 12, 5)
    packed = ticket_codec.pack_ticket(1, 0, [0])
    world._do = lambda _: None  # what becomes of them is another matter
    world.machine.tickets(world.now, 2, [(number, packed) for number in range(12)], 0)
    assert len(state.attempts) == 12 + TICKET_DEPTH
    for attempt in [*state.attempts.values()]:
        world.machine.drop_attempt(attempt, cancel=False, requeue=False)
    assert state.chosen == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_home_late_with_other_work_keeps_its_slots_while_alive(frozen: bool):
    world = SlotWorld([400])
    for _ in range(3):
        world.add_feeder()
    trainer = world.open_slots(1)
    world.run(lambda: len(trainer.given) > 20, 10)
    home = world.feeders[world.homes[0][0]]
    home.frozen = frozen
    world.machine.suspect(world.machine.feeders[home.endpoint.instance], world.now)
    trainer.finish()
    assert (len(world.homes[0]) > 1) == frozen


def test_slots_are_spread_evenly_over_fewer_feeders():
    world = SlotWorld([20] * 7)
    for _ in range(2):
        world.add_feeder()
    world.open_slots(1, window=14).finish()
    homes = [homes[0] for homes in world.homes.values()]
    assert sorted(homes.count(h) for h in set(homes)) == [3, 4]


def test_the_first_feeder_that_connects_does_not_get_all_slots():
    world = SlotWorld([20] * 4)
    for _ in range(4):
        world.add_feeder()
    first, *_ = world.feeders.values()
    up = world._up

    def late(feeder):
        world.at(0.0 if feeder is first else 1.0, lambda: up(feeder))

    world._up = late
    world.open_slots(1).finish()
    assert len({homes[0] for homes in world.homes.values()}) == 4


def test_feeders_that_never_connect_are_not_waited_for_long():
    world = SlotWorld([20] * 4)
    for _ in range(4):
        world.add_feeder()
    first, *_ = world.feeders.values()
    up = world._up
    world._up = lambda feeder: up(feeder) if feeder is first else None
    trainer = world.open_slots(1)
    world.run(lambda: trainer.given, GATHER_S + 1)
    trainer.finish()


def test_slots_move_to_new_feeders_if_few_batches_are_remade():
    world = SlotWorld([120] * 4)
    world.add_feeder()
    trainer = world.open_slots(1)
    world.run(lambda: len(trainer.given) > 20, GATHER_S + 60)
    for _ in range(3):
        world.add_feeder()
    trainer.finish()
    assert len({homes[-1] for homes in world.homes.values()}) == 4
    assert sum(len(homes) for homes in world.homes.values()) == 4 + 3
    assert world.remade <= 3 * MOST_AGAIN
    assert world.machine.counters.failures == world.machine.counters.retries == 0


def test_slots_that_would_remake_many_batches_stay():
    world = SlotWorld([MOST_AGAIN * 3] * 2)
    world.add_feeder()
    trainer = world.open_slots(1)
    world.run(lambda: len(trainer.given) > 2 * MOST_AGAIN + 20, 600)
    world.add_feeder()
    trainer.finish()
    assert world.remade == 0
    assert [len(homes) for homes in world.homes.values()] == [1, 1]


def test_slot_about_to_move_stays_if_the_new_feeder_dies():
    world = SlotWorld([100] * 2)
    world.add_feeder()
    trainer = world.open_slots(1)
    world.run(lambda: len(trainer.given) > 10, 600)
    late = world.add_feeder()
    world.run(lambda: any(s.next_home for s in world.machine.streams[1].slots.of.values()), 60)
    world.kill(late)
    trainer.finish()
    assert world.machine.counters.failures == 0


def test_killed_feeders_slots_are_remade_elsewhere_without_repeats():
    world = SlotWorld([60, 60])
    feeders = [world.add_feeder() for _ in range(3)]
    trainer = world.open_slots(1)
    world.at(0.3, lambda: world.kill(feeders[0]))
    trainer.finish()
    assert world.remade > 0
    assert any("first rebuilds" in note for note in world.notes)


@pytest.mark.parametrize("seed", range(30))
def test_order_holds_under_any_deaths_freezes_and_arrivals(seed):
    world = SlotWorld([0, 33, 21, 50], seed, limit=1 << 19)
    world.replace = True
    for _ in range(3):
        world.add_feeder(world.random.uniform(0.002, 0.02))
    trainer = world.open_slots(1, window=world.random.choice([1, 4, 12]))

    def strike() -> None:
        feeder = world.random.choice([f for f in world.feeders.values() if not f.dead])
        what = world.random.choice(["kill", "freeze", "unlist"])
        if what == "freeze":
            feeder.frozen = True
            world.at(world.random.uniform(1, 30), lambda: setattr(feeder, "frozen", False))
        elif what == "kill":
            world.kill(feeder)
        elif feeder.endpoint in world.listed:
            world.unlist(feeder)
        world.add_feeder(0.01)

    for _ in range(4):
        world.at(world.random.uniform(0, 1.0), strike)
    trainer.finish(limit_s=400)


def test_connection_that_recovers_soon_keeps_its_slots():
    world = SlotWorld([60, 60])
    for _ in range(3):
        world.add_feeder()
    trainer = world.open_slots(1)

    def cut() -> None:
        instance = world.homes[0][0]
        world.receiving.pop(instance, None)
        world.machine.feeder_down(world.now, instance, "cut")
        world.at(1.0, lambda: world._retry(world.feeders[instance]))

    world.at(0.3, cut)
    trainer.finish()
    assert all(len(homes) == 1 for homes in world.homes.values())


def test_slow_batch_is_waited_for_at_its_home():
    """The feeder says that user code takes long: another one would have to make all before it, too."""
    world = SlotWorld([20, 20])
    for _ in range(3):
        world.add_feeder()
    trainer = world.open_slots(1)
    slow = world._finished
    held: list = []

    def finished(feeder, key) -> None:
        if world.asked[key] == SlotPlace(1, 9) and not held:
            held.append(key)
            world.at(40.0, lambda: slow(feeder, key))
        else:
            slow(feeder, key)

    world._finished = finished
    trainer.finish()
    assert world.machine.counters.hedges == world.machine.counters.retries == 0
    assert all(len(homes) == 1 for homes in world.homes.values())


def test_silent_feeder_loses_its_slots():
    world = SlotWorld([60, 60])
    for _ in range(3):
        world.add_feeder()
    trainer = world.open_slots(1)
    world.at(0.3, lambda: setattr(world.feeders[world.homes[0][0]], "frozen", True))
    trainer.finish(limit_s=30)
    assert len(world.homes[0]) == 2


def test_slot_missing_from_the_bundle_is_refused():
    world = SlotWorld([5, 5])
    trainer = world.open_slots(1)
    payload = ticket_codec.pack_slot_ticket(SlotTicket(1, 0, 2, 4))
    with pytest.raises(RemoteProtocolError, match="slot 2 was requested"):
        world.machine.tickets(world.now, 1, [(trainer.drawn, payload)], 0)


def test_too_many_slots_are_refused():
    world = SlotWorld([1] * 2000)
    with pytest.raises(RemoteProtocolError, match=f"{MAX_SLOTS} are allowed"):
        world.open_slots(1, window=1500)


def test_feeders_release_all_slots_when_the_stream_ends():
    world = SlotWorld([8, 8, 8])
    feeders = [world.add_feeder() for _ in range(2)]
    world.open_slots(1).finish()
    world.run(lambda: sum(len(f.released) for f in feeders) == 3, world.now + 1)


def test_full_pool_and_paused_trainer_move_no_slot():
    """The home waits for space of ours, and has nothing to say meanwhile."""
    world = SlotWorld([60, 0], limit=6 * 12_288)
    for _ in range(2):
        world.add_feeder()
    trainer = world.open_slots(1, window=16)
    world.run(lambda: len(trainer.given) == 10)
    paused_until = world.now + 60
    go_on = trainer.next
    trainer.next = lambda: world.at(paused_until - world.now, go_on) if world.now < paused_until else go_on()
    trainer.finish()
    assert len(world.homes[0]) == 1
    assert not world.replaced
    assert world.machine.counters.retries == 0


TOLD = {
    "honest": lambda second: 1 + second // 6,
    "nothing": lambda second: 0,
    "more-than-there-are": lambda second: 11 + second,
}
"""Batches that a feeder claims to have made again, after some seconds."""


@pytest.mark.parametrize("tells", TOLD)
def test_deadline_counts_from_the_last_batch_remade(tells):
    world = SlotWorld([30], deadline_s=20.0)
    world.add_feeder()
    trainer = world.open_slots(1, window=1)
    finished, held = world._finished, []

    def slow(feeder, key) -> None:
        """A minute for batch 10, as if all before it had to be made again."""
        if world.asked[key].number != 10 or held:
            finished(feeder, key)
            return
        held.append(key)
        for second in range(0, 60, 5):
            told = TOLD[tells](second)
            world.at(second, lambda told=told: world._frame(feeder, FrameKind.ALIVE, key, room=told))
        world.at(60.0, lambda: finished(feeder, key))

    world._finished = slow
    if tells == "honest":
        trainer.finish()
    else:
        with pytest.raises(KeyError):  # the batch failed
            trainer.finish()
        assert b"DeadlineExceeded" in world.failed[1, 10]


def test_snapshot_of_a_slot_is_flagged_and_passed_to_a_new_home():
    world = SlotWorld([40])
    for _ in range(2):
        world.add_feeder()
    sent: list[tuple[int, ticket_codec.SlotTicket]] = []
    do = world._do

    def noted(item) -> None:
        if isinstance(item, Send) and item.header[3] == FrameKind.TICKET:
            header = frames.unpack_header(item.header, frames.FROM_RECEIVER)
            sent.append((header.flags, ticket_codec.unpack_slot_ticket(item.payload)))
        do(item)

    world._do = noted
    trainer = world.open_slots(1, window=2)
    world.run(lambda: len(trainer.given) == 10)
    home = world.feeders[world.homes[0][0]]
    header = world._header(FrameKind.SNAPSHOT, (1, 0))
    world.machine.frame(world.now, home.endpoint.instance, header, frames.pack_snapshot(0, 6, b"state"))
    world.run(lambda: len(trainer.given) == 15)
    flags, ticket = sent[-1]
    assert flags & Flag.RESTORABLE
    assert ticket.snapshot is None
    world.kill(home)
    sent.clear()
    trainer.finish()
    assert sent[0][1].snapshot == (6, b"state")
    assert sent[0][1].known[0] == sent[0][1].number - 1


@pytest.fixture
def asked():
    """A dispatcher whose feeder has two tickets of a slot: 0 asks whether there is such a batch, 1 wants it."""
    world = SlotWorld([2])
    feeder = world.add_feeder()
    world.run(lambda: world.machine.feeders[feeder.endpoint.instance].up)
    bundle = Bundle(blobs=(("0" * 64, 1),), workers=1)
    world.machine.open_stream(1, manifest=bundle.manifest(), bundle=bundle.id, facts={}, window=8)
    for number in range(2):
        ticket = ticket_codec.pack_slot_ticket(SlotTicket(1, number, 0, 4, asks=number == 0))
        world.machine.tickets(world.now, 1, [(number, ticket)], 0)
    world.machine.take()

    def answer(number: int, payload: bytes, flags: int = Flag.ENDED, *, failures: int = 0) -> list[object]:
        header = world._header(FrameKind.FAILED, (1, number), flags=flags)
        world.machine.frame(world.now, feeder.endpoint.instance, header, payload)
        assert world.machine.counters.failures == failures
        return [item for item in world.machine.take() if isinstance(item, (Fail, End, SayThere))]

    return answer


def test_existence_of_a_batch_reaches_the_trainer_without_a_message(asked):
    assert asked(0, frames.pack_there(0)) == [SayThere(1, 0)]


@pytest.mark.parametrize("number", [pytest.param(0, id="asked"), pytest.param(1, id="wanted")])
def test_end_of_a_slot_reaches_the_trainer_as_a_message(asked, number):
    assert asked(number, frames.pack_end(number)) == [End(1, number, number)]


def test_existence_sent_for_a_wanted_batch_is_refused(asked):
    with pytest.raises(RemoteProtocolError, match="ticket 1 requests a batch, but a feeder answered only"):
        asked(1, frames.pack_there(1))


@pytest.mark.parametrize(
    "payload",
    [
        frames.pack_end(2),
        frames.pack_end(-1),
        b'{"ended": true}',
        b'{"ended": 1.0}',
        b'{"ended"',
        b"{}",
        b"",
        b"[]",
    ],
    ids=repr,
)
def test_end_that_contradicts_its_ticket_is_refused(asked, payload):
    """A slot without batch 1 has at most one."""
    with pytest.raises(
        RemoteProtocolError, match=r"the end of a slot|a slot without batch 1 must have 0 to 1 batches"
    ):
        asked(1, payload)
    assert asked(1, frames.pack_end(1)) == [End(1, 1, 1)], "and changed nothing"


@pytest.mark.parametrize("payload", [frames.pack_end(0), frames.pack_there(0), b"7"], ids=repr)
def test_end_of_a_ticket_without_a_slot_is_refused(payload):
    world = World()
    feeder = world.add_feeder()
    world.open(1, 1)
    world.run(lambda: world.machine.feeders[feeder.endpoint.instance].attempts)
    header = world._header(FrameKind.FAILED, (1, 0), flags=Flag.ENDED)
    with pytest.raises(
        RemoteProtocolError,
        match="ticket 0 has no slot that could end, but feeder-0 reports the end of a slot",
    ):
        world.machine.frame(world.now, feeder.endpoint.instance, header, payload)
    assert not any(isinstance(item, (Fail, End)) for item in world.machine.take())


def test_claims_of_batches_made_again_do_not_delay_a_ticket_without_a_slot():
    world = World(deadline_s=20.0)
    feeder = world.add_feeder(pace_s=1e6)
    trainer = world.open(1, 1)
    for second in range(0, 60, 5):
        world.at(second, lambda told=second: world._frame(feeder, FrameKind.ALIVE, (1, 0), room=1 + told))
    world.run(lambda: trainer.done)
    assert b"DeadlineExceeded" in world.failed[1, 0]
    assert world.now < 50


@pytest.mark.parametrize("payload", [frames.pack_end(0), frames.pack_there(0), b"7"], ids=repr)
@pytest.mark.parametrize("flags", [0, Flag.ELSEWHERE, Flag.ELSEWHERE | Flag.ENDED], ids=repr)
def test_failure_of_a_feeder_is_passed_on_as_its_own_and_never_as_an_end(asked, payload, flags):
    for item in asked(1, payload, flags, failures=1):
        assert (type(item), item.is_own) == (Fail, False)
