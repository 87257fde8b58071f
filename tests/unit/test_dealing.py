"""Which rank gets which batch of which slot: the order of one process, dealt in turn, however late ends are known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.ticket_codec import SlotTicket
from dataloaderjob.feeder import dealing
from dataloaderjob.feeder.dealing import Needs
from dataloaderjob.trainer.epochs.dealing import Deal
from dataloaderjob.trainer.session.slot_places import DEALT, Saved, SlotPlace

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=5)
RANKS = st.integers(1, 6)


def in_turn(lengths: list[int]) -> list[SlotPlace]:
    """Batches as one process has them."""
    return [
        SlotPlace(s, n) for n in range(max(lengths, default=0)) for s in range(len(lengths)) if n < lengths[s]
    ]


@dataclass
class Walk:
    """One rank, whose tickets are answered in their order; what it was given, and what it asked for."""

    lengths: list[int]
    deal: Deal
    steps_ahead: int
    ranks: int
    given: list[SlotPlace] = field(default_factory=list)
    bodies: int = 0
    padded: SlotPlace | None = None

    def run(self, most: int | None = None) -> None:
        on_the_way: deque[tuple[SlotPlace, bool]] = deque()
        hand = None
        while most is None or len(self.given) < most:
            while (asked := self.deal.next(self.steps_ahead * self.ranks)) is not None:
                on_the_way.append(asked)
            if hand is not None and self.deal.is_whole:
                self.given.append(hand)
                self.deal.stands(self.deal.took(hand, 1))
                hand = None
            elif on_the_way:
                place, is_wanted = on_the_way.popleft()
                self.bodies += is_wanted
                if place.number >= self.lengths[place.slot]:
                    self.deal.ended(place, self.lengths[place.slot])
                elif self.deal.there(place):
                    assert is_wanted
                    hand = place
            else:
                assert self.deal.is_over
                if self.deal.pads():
                    asked = self.deal.next(0)
                    self.padded = hand if asked is None else asked[0]
                return


@given(LENGTHS, RANKS, st.integers(1, 4))
def test_ranks_take_turns_over_the_order_of_one_process(lengths, ranks, ahead):
    order = in_turn(lengths)
    steps = len(order) // ranks
    for rank in range(ranks):
        walk = Walk(lengths, Deal(len(lengths), ranks, rank, tail="pad"), ahead, ranks)
        walk.run()
        assert walk.given == order[rank : steps * ranks : ranks]
        rest = order[steps * ranks :]
        assert walk.padded == (rest[rank % len(rest)] if rest else None)


@given(LENGTHS, RANKS, st.integers(1, 4), st.integers(0, 12))
def test_all_ranks_can_resume_from_any_ranks_state(lengths, ranks, ahead, stop):
    order = in_turn(lengths)
    steps = len(order) // ranks
    stop = min(stop, steps)
    states = []
    for rank in range(ranks):
        walk = Walk(lengths, Deal(len(lengths), ranks, rank, tail="pad"), ahead, ranks)
        walk.run(stop)
        states.append(walk.deal.pack())
    assert all(state["taken"] == states[0]["taken"] for state in states)
    saved = Saved.of(states[stop % ranks], 77)
    for rank in range(ranks):
        deal = Deal(len(lengths), ranks, rank, first=saved.taken, ends=saved.ends)
        walk = Walk(lengths, deal, ahead, ranks)
        walk.run()
        assert walk.given == order[stop * ranks + rank : steps * ranks : ranks]


def test_three_long_slots_make_few_batches_twice_for_eight_ranks():
    lengths, ranks = [400, 401, 400], 8
    walk = Walk(lengths, Deal(3, ranks, 3), 4, ranks)
    walk.run()
    assert len(walk.given) == 1201 // 8
    assert walk.bodies <= len(walk.given) + 3 * 4


def test_state_names_no_rank_and_its_snapshots_serve_all():
    deal = Deal(2, 2, 0)
    walk = Walk([9, 9], deal, 3, 2)
    walk.run(4)
    deal.keep(0, 3, b"third")
    deal.keep(0, 40, b"of nothing that was asked")
    packed = deal.pack()
    assert packed["rank"] == DEALT
    assert Saved.of(packed, 1).snapshots == {0: (3, b"third")}


def test_new_home_begins_at_a_snapshot_before_every_ranks_position():
    deal = Deal(1, 2, 0)
    walk = Walk([90], deal, 1, 2)
    for steps, made in ((2, 3), (10, 19)):
        walk.run(steps)
        deal.keep(0, made, b"state")
    assert deal.beginning(0, 20) == (3, b"state")


def packed(needed: int, **more: Any) -> tuple[SlotTicket, bytes]:
    ticket = SlotTicket(1, 50, 0, 4, needed=needed, **more)
    return ticket, ticket_codec.pack_slot_ticket(ticket)


def bundle(code: str = "a", **more: Any) -> Bundle:
    return Bundle(blobs=((code * 64, 1),), **{"workers": 2, "slot": 0, "ranks": 2, **more})


def test_feeder_keeps_batches_that_the_slowest_rank_may_request():
    needs = Needs()

    def needed(receiver: int, own: int, **more: Any) -> tuple[int, bool]:
        ticket, data = packed(own, **more)
        needs.hear(bundle(), receiver, own)
        found = ticket_codec.unpack_slot_ticket(needs.of_all(bundle(), ticket, data))
        assert found is not None
        assert (found.number, found.size) == (50, 4)
        return found.needed, found.snapshot is not None

    assert needed(1, 10) == (10 - 2 * 2, False), "the other one is about there"
    assert needed(1, 10, snapshot=(6, b"state")) == (6, True)
    assert needed(1, 10, snapshot=(7, b"state")) == (6, False), "the other one may need what lies before it"
    assert needed(2, 3) == (3, False)
    assert needed(1, 10, snapshot=(4, b"state")) == (3, False)
    assert needed(1, 10, snapshot=(3, b"state")) == (3, True)
    needs.closed(2)
    assert needed(1, 20) == (16, False)
    needs.released(bundle().id, 2)
    assert needed(1, 21) == (21, False)
    assert needed(2, 4) == (4, False), "it is back"


def test_no_rank_needs_batches_before_the_resumed_state():
    needs, resumed = Needs(), bundle(taken=(40, 41))
    needs.hear(resumed, 1, 40)
    ticket, data = packed(40, snapshot=(40, b"state"))
    found = ticket_codec.unpack_slot_ticket(needs.of_all(resumed, ticket, data))
    assert found is not None
    assert found.needed == 40
    assert found.snapshot is not None


def test_rank_gets_only_a_few_steps_ahead_of_the_slowest():
    needs = Needs()
    assert needs.may_make(bundle(), 1000), "nobody is known"
    needs.hear(bundle(), 1, 10)
    needs.hear(bundle(), 2, 0)
    most = dealing.STEPS_AHEAD * 2 + dealing.BATCHES_AHEAD
    assert [needs.may_make(bundle(), number) for number in (most - 1, most)] == [True, False]
    needs.hear(bundle(), 2, 1)
    assert needs.may_make(bundle(), most)
    needs.released(bundle().id, 2)
    assert needs.may_make(bundle(), most + 9)


@pytest.mark.parametrize(
    ("more", "needed", "said"),
    [
        ({}, 90, ""),
        ({"code": "b"}, 0, dealing.LOADERS),
        ({"workers": 3}, 0, dealing.LOADERS),
        ({"facts": {"batches": [8]}}, 0, dealing.LOADERS),
        ({"taken": (7, 7)}, 0, dealing.LOADERS),
        ({"epoch": 0}, 4, ""),
        ({"epoch": 0}, 5, "epoch 1 of its loader while another is in epoch 0"),
        ({"epoch": 2}, 90, ""),
        ({"code": "b", "slot": 1}, 90, ""),
        ({"code": "b", "loader": 7}, 90, ""),
    ],
)
def test_ranks_with_different_loaders_are_refused(more: dict[str, Any], needed: int, said: str):
    other = bundle(**{"epoch": 1, **more})
    users = {bundle(epoch=1).id: {1}}
    for others, expected in (({2}, said), ({1}, ""), (set(), "")):
        known = users if other.id in users else {**users, other.id: others}
        found = dealing.refusal(
            bundle(epoch=1), 1, needed, [other], lambda name, known=known: known.get(name, set())
        )
        assert expected in found if expected else not found


def test_rank_in_both_epochs_is_not_refused():
    first, second = bundle(epoch=0), bundle(epoch=1)
    users = {first.id: {2}, second.id: {1, 2}}
    assert not dealing.refusal(second, 1, 90, [first], users.__getitem__)


class Lockstep:
    """Ranks that step together, and feeders that make no batch too far ahead of the slowest."""

    def __init__(self, lengths: list[int], ranks: int, steps_ahead: int, *, has_stage: bool) -> None:
        self.lengths, self.ranks, self.most = lengths, ranks, steps_ahead * ranks
        self.has_stage, self.needs = has_stage, Needs()
        self.deals = [Deal(len(lengths), ranks, rank) for rank in range(ranks)]
        self.asked: list[deque[tuple[SlotPlace, bool]]] = [deque() for _ in range(ranks)]
        self.hands: list[SlotPlace | None] = [None] * ranks
        self.lines: list[deque[tuple[SlotPlace, Any]]] = [deque() for _ in range(ranks)]
        self.given: list[list[SlotPlace]] = [[] for _ in range(ranks)]
        self.ended: set[int] = set()

    def bundle(self, slot: int) -> Bundle:
        return bundle(slot=slot, ranks=self.ranks)

    def moves(self, rank: int) -> bool:
        """Whether the rank could do anything."""
        deal, asked, line = self.deals[rank], self.asked[rank], self.lines[rank]
        moved = False
        while (found := deal.next(self.most - len(line) * self.ranks)) is not None:
            asked.append(found)
            self.needs.hear(self.bundle(found[0].slot), rank, deal.needed(found[0].slot))
            moved = True
        hand = self.hands[rank]
        if hand is not None and deal.is_whole:
            if self.has_stage or self._may_step(rank):
                self.hands[rank] = None
                line.append((hand, deal.took(hand, 1)))
                if not self.has_stage:
                    deal.stands(line[-1][1])
                moved = True
        elif asked and self._is_made(asked[0][0]):
            place, _ = asked.popleft()
            if place.number >= self.lengths[place.slot]:
                self.ended.add(place.slot)
                deal.ended(place, self.lengths[place.slot])
            elif deal.there(place):
                self.hands[rank] = place
            moved = True
        if line and self._may_step(rank):
            place, mark = line.popleft()
            self.given[rank].append(place)
            if self.has_stage:
                deal.stands(mark)
            moved = True
        return moved

    def _is_made(self, place: SlotPlace) -> bool:
        return place.slot in self.ended or self.needs.may_make(self.bundle(place.slot), place.number)

    def _may_step(self, rank: int) -> bool:
        return len(self.given[rank]) <= min(map(len, self.given))


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=4), st.integers(1, 8), st.integers(1, 40), st.booleans()
)
def test_ranks_in_lockstep_all_reach_the_end(lengths, ranks, ahead, has_stage):
    world = Lockstep(lengths, ranks, ahead, has_stage=has_stage)
    while sum(world.moves(rank) for rank in range(ranks)):
        pass
    order = in_turn(lengths)
    steps = len(order) // ranks
    assert world.given == [order[rank : steps * ranks : ranks] for rank in range(ranks)]
