"""The trainer's books of what it holds: what a new sidecar is told to leave alone."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dataloaderjob.core.control import Control, seal
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.trainer.ring import MADE_TOGETHER, MAX_PLACES, Ring, make_views, map_region

PAGE = 4096
NBYTES = 16 * PAGE


@pytest.fixture
def ring() -> Iterator[Ring]:
    control, wake = Control.create(), os.eventfd(0)
    fd = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    seal(fd)
    made = Ring(Control(control), wake)
    made.limit(NBYTES)
    made.regions[1] = map_region(1, NBYTES, False, fd)
    yield made
    made.drop(1)
    os.close(control)
    os.close(wake)


def taken(ring: Ring, number: int, page: int, nbytes: int = PAGE):
    lent, lease = lend(ring, number, page, nbytes)
    lease.tail = ring.tail
    return lent


def lend(ring: Ring, number: int, page: int, nbytes: int = PAGE):
    entry = 1, 0, 1, page * PAGE, nbytes
    lent, lease, _ = make_views(ring.region(entry), page * PAGE, nbytes, leaves)
    ring.lend(number, entry, lease)
    return lent, lease


def leaves(lent):
    return [torch.from_numpy(lent[:64]), torch.from_numpy(lent[64:128])]


def books(ring: Ring):
    return {number: place[:3] for number, place in ring.leases.items()}


def ended(ring: Ring):
    assert ring.tail.ended is not None
    return [number for number in range(20) if ring.tail.ended[number]]


def test_a_lease_that_ended_and_one_with_its_number_are_told_apart(ring: Ring):
    """The receiver uses a number anew as soon as it sees the end."""
    first = taken(ring, 5, page=0)
    del first
    assert ended(ring) == [5]
    assert books(ring) == {}
    second = taken(ring, 5, page=3)
    assert books(ring) == {5: (1, 3 * PAGE, PAGE)}
    assert ring.leased_nbytes == PAGE
    del second
    assert books(ring) == {}
    assert ring.leased_nbytes == 0


def test_a_lease_ends_with_its_last_view_and_not_before(ring: Ring):
    lent = taken(ring, 7, page=1)
    view = np.ndarray((4,), np.int64, lent, 64)
    tensor = torch.from_numpy(np.ndarray((2, 2), np.float32, lent, 128))
    part = lent[8:16]
    del lent
    assert not ended(ring)
    del view
    assert not ended(ring)
    del part
    assert not ended(ring)
    column = tensor[:, 1]
    del tensor
    assert not ended(ring)
    del column
    assert ended(ring) == [7]


def test_a_lease_that_was_not_begun_does_not_end(ring: Ring):
    lent, lease = lend(ring, 3, page=0)
    del lent, lease
    assert not ended(ring)
    assert taken(ring, 3, page=0).nbytes == PAGE, "it is lent again"
    assert ended(ring) == [3]


def test_a_lease_that_was_not_begun_can_be_taken_back(ring: Ring):
    lent, _ = lend(ring, 3, page=0)
    ring.forget(3)
    del lent
    assert not ended(ring)
    assert books(ring) == {}


def test_leases_of_which_some_end_on_other_threads_leave_nothing_in_the_books(ring: Ring):
    held: queue.SimpleQueue = queue.SimpleQueue()

    def let_go() -> None:
        while held.get() is not None:
            pass

    threads = [threading.Thread(target=let_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    free, lent = set(range(16)), 0
    assert ring.tail.ended is not None
    while lent < 3000:
        for number in ended(ring):
            ring.tail.ended[number] = 0
            free.add(number)
        if free:
            number = free.pop()
            assert number not in ring.leases
            held.put(taken(ring, number, page=number))
            lent += 1
    for _ in threads:
        held.put(None)
    for thread in threads:
        thread.join()
    assert ring.leases == {}
    assert ring.leased_nbytes == 0


def test_what_is_surely_within_the_limit_follows_the_largest_lease(ring: Ring):
    small = taken(ring, 1, page=0)
    assert ring.surely == 16
    large = taken(ring, 2, page=1, nbytes=5 * PAGE)
    assert ring.surely == 3
    assert not ring.over_limit
    others = [taken(ring, 3 + i, page=6) for i in range(10)]
    assert not ring.over_limit
    others.append(taken(ring, 13, page=7))
    assert ring.over_limit
    del large
    assert not ring.over_limit
    ring.limit(PAGE)
    assert ring.surely == 0
    assert ring.over_limit
    del small, others


def test_an_entry_beyond_its_region_is_refused(ring: Ring):
    with pytest.raises(RemoteProtocolError, match="of a region of 65536"):
        ring.region((1, 0, 1, NBYTES - PAGE, PAGE + 1))


def test_views_of_a_place_that_comes_again_are_made_several_at_a_time_and_each_given_once(ring: Ring):
    calls = []

    def make(lent):
        calls.append(lent)
        return leaves(lent)

    region = ring.regions[1]
    found = [ring.spares.views(region, PAGE, PAGE, b"schema", make) for _ in range(MADE_TOGETHER + 2)]
    assert len(calls) == 1 + 2 * MADE_TOGETHER, "one for a place that is new, several from then on"
    assert len({id(lent) for lent, _, _ in found}) == len(found)
    assert len({id(lease) for _, lease, _ in found}) == len(found)
    assert len({tensor.untyped_storage()._cdata for _, _, made in found for tensor in made}) == 2 * len(found)
    region.map[PAGE : PAGE + 128] = bytes(range(128))
    for lent, _, (first, second) in found:
        assert lent.shape == (PAGE,)
        assert first.tolist() == list(range(64))
        assert second.tolist() == list(range(64, 128))


def test_views_are_not_given_for_another_schema_or_size_of_the_same_place(ring: Ring):
    region = ring.regions[1]
    for key, nbytes in ((b"a", PAGE), (b"b", PAGE), (b"b", 2 * PAGE), (b"a", PAGE)) * 3:
        lent, _, made = ring.spares.views(region, 0, nbytes, key, lambda lent, key=key: [key, lent.nbytes])
        assert lent.nbytes == nbytes
        assert made == [key, nbytes]


def test_spares_that_are_let_go_end_no_lease_and_are_bounded(ring: Ring):
    region, made = ring.regions[1], []

    def make(lent):
        made.append(weakref.ref(lent))
        return leaves(lent)

    for _ in range(3):
        for at in range(2 * MAX_PLACES):
            ring.spares.views(region, 64 * at, PAGE, b"schema", make)
    assert sum(ref() is not None for ref in made) <= MAX_PLACES * MADE_TOGETHER
    ring.spares.views(region, 0, PAGE, b"schema", make)
    ring.spares.views(region, 0, PAGE, b"schema", make)
    assert any(ref() is not None for ref in made)
    ring.spares.clear()
    assert all(ref() is None for ref in made)
    assert not ended(ring)
    assert books(ring) == {}
