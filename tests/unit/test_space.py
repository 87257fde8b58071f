"""Extents never overlap, never leave their region, and all bytes come back."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dataloaderjob.core.control import PAGE
from dataloaderjob.sidecar.dispatch.instructions import Unpublish
from dataloaderjob.sidecar.dispatch.placing import Arena, Extent, Placer, Space, round_up
from dataloaderjob.sidecar.dispatch.streams import Stream, Ticket, TicketEvent

PAGES = 64


def largest_free(arena):
    return max((nbytes for _, nbytes in arena._free), default=0)


class ArenaMachine(RuleBasedStateMachine):
    """alloc, free, trim and take in any order."""

    extents = Bundle("extents")

    def __init__(self):
        super().__init__()
        self.arena = Arena(PAGES * PAGE)

    @rule(target=extents, nbytes=st.integers(0, PAGES * PAGE + 1))
    def alloc(self, nbytes):
        largest = largest_free(self.arena)
        offset = self.arena.alloc(nbytes)
        assert (offset is None) == (round_up(nbytes) > largest)
        return offset

    @rule(offset=consumes(extents))
    def free(self, offset):
        if offset is not None and offset in self.arena.used:
            self.arena.free(offset)

    @rule(offset=extents, nbytes=st.integers(0, PAGES * PAGE))
    def trim(self, offset, nbytes):
        if offset is not None and offset in self.arena.used:
            before = self.arena.used[offset]
            assert self.arena.trim(offset, nbytes) == min(before, round_up(nbytes))

    @rule(
        target=extents,
        page=st.integers(-1, PAGES + 1),
        nbytes=st.integers(1, 8 * PAGE),
        skew=st.sampled_from([0, 1]),
    )
    def take(self, page, nbytes, skew):
        offset = page * PAGE + skew
        return offset if self.arena.take(offset, nbytes) else None

    @invariant()
    def nothing_overlaps_and_nothing_is_lost(self):
        spans = sorted([(o, n) for o, n in self.arena.used.items()] + self.arena._free)
        assert sum(n for _, n in spans) == PAGES * PAGE
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))
        assert all(a % PAGE == 0 for a, _ in spans)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=100, deadline=None)


@given(st.lists(st.integers(1, 10 * PAGE), max_size=30), st.randoms())
def test_extents_freed_in_any_order_leave_one_free_span(sizes, random):
    arena = Arena(400 * PAGE)
    offsets = [arena.alloc(n) for n in sizes]
    assert None not in offsets
    random.shuffle(offsets)
    for offset in offsets:
        arena.free(offset)
    assert largest_free(arena) == 400 * PAGE


def test_single_use_region_is_removed_with_its_batch():
    space = Space(limit_nbytes=1 << 30)
    region = space.add(PAGE, single=True)
    assert space.arenas[region].alloc(10) == 0
    assert space.alloc(10) is None, "a single is for one batch only"
    assert space.free(Extent(region, 0, PAGE)) == region
    assert space.total_nbytes == 0


def test_an_extent_is_freed_once():
    space = Space(limit_nbytes=1 << 30)
    space.add(4 * PAGE)
    extent = space.alloc(100)
    assert space.free(extent) is None
    with pytest.raises(KeyError):
        space.free(extent)


def test_memfd_of_one_batch_does_not_count_as_pool():
    """A batch of a hundred pages comes, and then all batches have four."""
    grown = []
    for has_single in (False, True):
        placer = Placer(1000 * PAGE, None, [])
        stream = Stream(1, b"bundle", b"", {}, 16, 0)
        stream.saw_size(PAGE)
        placer.fit([stream], PAGE)
        if has_single:
            placer.room_for_awaited(100 * PAGE, [stream], list, lambda _: None)
        stream.saw_size(4 * PAGE)
        placer.fit([stream], 4 * PAGE)
        grown.append(placer.space.pool_nbytes)
    assert grown[0] == grown[1] > 16 * 4 * PAGE


def test_ready_batch_farthest_from_its_turn_makes_room_first():
    out = []
    placer = Placer(4 * PAGE, 3 * PAGE, out)
    stream = Stream(1, b"bundle", b"", {}, 16, 0)
    placer.fit([stream], PAGE)
    for number in range(4):
        ticket = stream.tickets[number] = Ticket(stream, number, b"", 0.0)
        if number:
            ticket.move(TicketEvent.ASK)
            ticket.move(TicketEvent.FILL)
            ticket.lease = placer.lease(ticket, placer.space.alloc(PAGE))
    assert placer.space.alloc(PAGE) is None
    out.clear()
    placer.room_for_awaited(PAGE, [stream], list, lambda _: None)
    assert out == [Unpublish(1, 3)]
