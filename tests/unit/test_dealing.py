"""Which rank gets which batch of which slot: the order of one process, dealt in turn, however late ends are known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import frames
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.frames import SlotTicket
from dataloaderjob.feeder.dealing import Needs, is_rival
from dataloaderjob.trainer.dealing import Deal
from dataloaderjob.trainer.slots import DEALT, Place, Saved

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=5)
RANKS = st.integers(1, 6)


def in_turn(lengths: list[int]) -> list[Place]:
    """Batches as one process has them."""
    return [
        Place(s, n) for n in range(max(lengths, default=0)) for s in range(len(lengths)) if n < lengths[s]
    ]


@dataclass
class Walk:
    """One rank, whose tickets are answered in their order; what it was given, and what it asked for."""

    lengths: list[int]
    deal: Deal
    steps_ahead: int
    ranks: int
    given: list[Place] = field(default_factory=list)
    bodies: int = 0
    padded: Place | None = None

    def run(self, most: int | None = None) -> None:
        on_the_way: deque[tuple[Place, bool]] = deque()
        hand = None
        while most is None or len(self.given) < most:
            while (asked := self.deal.next(self.steps_ahead * self.ranks)) is not None:
                on_the_way.append(asked)
            if hand is not None and self.deal.is_whole:
                self.given.append(hand)
                self.deal.gave(hand, 1)
                self.deal.stepped()
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
                if self.deal.in_step:
                    self.padded = self.deal.padding() or hand
                return


@given(LENGTHS, RANKS, st.integers(1, 4))
def test_ranks_get_in_turn_what_one_process_has_in_order(lengths, ranks, ahead):
    order = in_turn(lengths)
    steps = len(order) // ranks
    for rank in range(ranks):
        walk = Walk(lengths, Deal(len(lengths), ranks, rank), ahead, ranks)
        walk.run()
        assert walk.given == order[rank : steps * ranks : ranks]
        rest = order[steps * ranks :]
        assert walk.padded == (rest[rank % len(rest)] if rest else None)


@given(LENGTHS, RANKS, st.integers(1, 4), st.integers(0, 12))
def test_any_ranks_state_is_gone_on_with_by_all(lengths, ranks, ahead, stop):
    order = in_turn(lengths)
    steps = len(order) // ranks
    stop = min(stop, steps)
    states = []
    for rank in range(ranks):
        walk = Walk(lengths, Deal(len(lengths), ranks, rank), ahead, ranks)
        walk.run(stop)
        states.append(walk.deal.pack())
    assert all(state["taken"] == states[0]["taken"] for state in states)
    saved = Saved.of(states[stop % ranks], 77)
    for rank in range(ranks):
        deal = Deal(len(lengths), ranks, rank, first=saved.taken, ends=saved.ends)
        walk = Walk(lengths, deal, ahead, ranks)
        walk.run()
        assert walk.given == order[stop * ranks + rank : steps * ranks : ranks]


def test_three_long_slots_cost_eight_ranks_few_batches_twice():
    lengths, ranks = [400, 401, 400], 8
    walk = Walk(lengths, Deal(3, ranks, 3), 4, ranks)
    walk.run()
    assert len(walk.given) == 1201 // 8
    assert walk.bodies <= len(walk.given) + 3 * 4


def test_a_state_names_no_rank_and_its_snapshots_are_for_all():
    deal = Deal(2, 2, 0)
    walk = Walk([9, 9], deal, 3, 2)
    walk.run(4)
    deal.keep(0, 3, b"third")
    deal.keep(0, 40, b"of nothing that was asked")
    packed = deal.pack()
    assert packed["rank"] == DEALT
    assert Saved.of(packed, 1).snapshots == {0: (3, b"third")}


def test_a_new_home_begins_where_no_rank_needs_what_lies_before():
    deal = Deal(1, 2, 0)
    walk = Walk([90], deal, 1, 2)
    for steps, made in ((2, 3), (10, 19)):
        walk.run(steps)
        deal.keep(0, made, b"state")
    assert deal.beginning(0, 20) == (3, b"state")


def packed(needed: int, **more: Any) -> tuple[SlotTicket, bytes]:
    ticket = SlotTicket(1, 50, 0, 4, needed=needed, **more)
    return ticket, frames.pack_slot_ticket(ticket)


def bundle(**more: Any) -> Bundle:
    return Bundle(blobs=(("a" * 64, 1),), workers=2, slot=0, ranks=2, **more)


def test_a_feeder_keeps_what_the_slowest_rank_may_ask_for():
    needs = Needs()

    def needed(receiver: int, own: int, **more: Any) -> tuple[int, bool]:
        found = frames.unpack_slot_ticket(needs.of_all(bundle(), receiver, *packed(own, **more)))
        assert found is not None
        assert (found.number, found.size) == (50, 4)
        return found.needed, found.snapshot is not None

    assert needed(1, 10) == (10 - 2 * 2, False), "the other one is about there"
    assert needed(1, 10, snapshot=(9, b"state")) == (6, True)
    assert needed(2, 3) == (3, False)
    assert needed(1, 10, snapshot=(9, b"state")) == (3, False), "the other one needs what lies before it"
    assert needed(1, 10, snapshot=(3, b"state")) == (3, True)
    needs.closed(2)
    assert needed(1, 20) == (16, False)
    needs.released(bundle().id, 2)
    assert needed(1, 21) == (21, False)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, False),
        ({"code": "b"}, True),
        ({"code": "b", "epoch": 1}, False),
        ({"code": "b", "slot": 1}, False),
    ],
)
def test_ranks_with_other_data_are_rivals(more: dict[str, Any], found: bool):
    fields = {"workers": 2, "slot": 0, "ranks": 2, **more}
    other = Bundle(blobs=((fields.pop("code", "a") * 64, 1),), **fields)
    assert is_rival(bundle(), [other]) is found
