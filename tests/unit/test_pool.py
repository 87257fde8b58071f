"""The trainer's books of what it holds: what a new sidecar is told to leave alone."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dataloaderjob.core.control import W_WANT, Control, seal
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.trainer.pool import MADE_TOGETHER, MAX_LEAVES, MAX_PLACES, Pool, map_region

PAGE = 4096
NBYTES = 16 * PAGE


@pytest.fixture
def pool() -> Iterator[Pool]:
    control, wake = Control.create(), os.eventfd(0)
    fd = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    seal(fd)
    made = Pool(Control(control), wake)
    made.limit(NBYTES)
    made.regions[1] = map_region(1, NBYTES, False, fd)
    yield made
    made.drop(1)
    os.close(control)


def taken(pool: Pool, number: int, page: int, nbytes: int = PAGE):
    lent, lease = lend(pool, number, page, nbytes)
    lease.tail = pool.tail
    return lent


def lend(pool: Pool, number: int, page: int, nbytes: int = PAGE, plan: Any = None):
    entry = 1, 0, 1, page * PAGE, nbytes
    return pool.lend(number, pool.regions[1], entry, plan or Fixed())[:2]


class Fixed:
    """A plan of batches of two tensors of 64 bytes."""

    def __init__(self, head: bytes = b"schema", *, plain: bool = True):
        self.head, self.plain, self.num_leaves = head, plain, 2
        self.made: list[Any] = []
        """Arrays of which tensors were made, weakly."""

    def make(self, lent):
        self.made.append(weakref.ref(lent))
        return [torch.from_numpy(lent[:64]), torch.from_numpy(lent[64:128])]

    @property
    def kept(self):
        return sum(ref() is not None for ref in self.made)


def books(pool: Pool):
    return {number: place[:3] for number, place in pool.leases.items()}


def ended(pool: Pool):
    assert pool.tail.ended is not None
    return [number for number in range(20) if pool.tail.ended[number]]


def test_a_lease_that_ended_and_one_with_its_number_are_told_apart(pool: Pool):
    """The receiver uses a number anew as soon as it sees the end."""
    first = taken(pool, 5, page=0)
    del first
    assert ended(pool) == [5]
    assert books(pool) == {}
    second = taken(pool, 5, page=3)
    assert books(pool) == {5: (1, 3 * PAGE, PAGE)}
    assert pool.leased_nbytes == PAGE
    del second
    assert books(pool) == {}
    assert pool.leased_nbytes == 0


def test_a_lease_ends_with_its_last_view_and_not_before(pool: Pool):
    lent = taken(pool, 7, page=1)
    view = np.ndarray((4,), np.int64, lent, 64)
    tensor = torch.from_numpy(np.ndarray((2, 2), np.float32, lent, 128))
    part = lent[8:16]
    del lent
    assert not ended(pool)
    del view
    assert not ended(pool)
    del part
    assert not ended(pool)
    column = tensor[:, 1]
    del tensor
    assert not ended(pool)
    del column
    assert ended(pool) == [7]


def test_a_lease_that_was_not_begun_does_not_end(pool: Pool):
    lent, lease = lend(pool, 3, page=0)
    del lent, lease
    assert not ended(pool)
    assert taken(pool, 3, page=0).nbytes == PAGE, "it is lent again"
    assert ended(pool) == [3]


def test_a_lease_that_was_not_begun_can_be_taken_back(pool: Pool):
    lent, _ = lend(pool, 3, page=0)
    pool.forget(3)
    del lent
    assert not ended(pool)
    assert books(pool) == {}


def test_leases_of_which_some_end_on_other_threads_leave_nothing_in_the_books(pool: Pool):
    held: queue.SimpleQueue = queue.SimpleQueue()

    def let_go() -> None:
        while held.get() is not None:
            pass

    threads = [threading.Thread(target=let_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    free, lent = set(range(16)), 0
    assert pool.tail.ended is not None
    while lent < 3000:
        for number in ended(pool):
            pool.tail.ended[number] = 0
            free.add(number)
        if free:
            number = free.pop()
            assert number not in pool.leases
            held.put(taken(pool, number, page=number))
            lent += 1
    for _ in threads:
        held.put(None)
    for thread in threads:
        thread.join()
    assert pool.leases == {}
    assert pool.leased_nbytes == 0


def test_what_is_surely_within_the_limit_follows_the_largest_lease(pool: Pool):
    small = taken(pool, 1, page=0)
    assert pool.surely == 16
    large = taken(pool, 2, page=1, nbytes=5 * PAGE)
    assert pool.surely == 3
    assert not pool.over_limit
    others = [taken(pool, 3 + i, page=6) for i in range(10)]
    assert not pool.over_limit
    others.append(taken(pool, 13, page=7))
    assert pool.over_limit
    del large
    assert not pool.over_limit
    pool.limit(PAGE)
    assert pool.surely == 0
    assert pool.over_limit
    del small, others


def test_an_entry_beyond_its_region_is_refused(pool: Pool):
    with pytest.raises(RemoteProtocolError, match="of a region of 65536"):
        lend(pool, 1, page=15, nbytes=PAGE + 1)
    assert books(pool) == {}


def test_views_of_a_place_that_comes_again_are_made_several_at_a_time_and_each_lent_once(pool: Pool):
    plan, entry = Fixed(), (1, 0, 1, PAGE, PAGE)
    found = [pool.lend(number, pool.regions[1], entry, plan) for number in range(MADE_TOGETHER + 2)]
    assert len(plan.made) == 1 + 2 * MADE_TOGETHER, "one for a place that is new, several from then on"
    assert len({id(lent) for lent, *_ in found}) == len(found)
    assert [lease.number for _, lease, *_ in found] == list(range(len(found)))
    assert len({tensor.untyped_storage()._cdata for _, _, made, _ in found for tensor in made}) == 2 * len(
        found
    )
    pool.regions[1].map[PAGE : PAGE + 128] = bytes(range(128))
    for lent, _, (first, second), place in found:
        assert place[:3] == (1, PAGE, PAGE)
        assert lent.shape == (PAGE,)
        assert first.tolist() == list(range(64))
        assert second.tolist() == list(range(64, 128))


def test_views_are_not_lent_for_another_schema_or_size_of_the_same_place(pool: Pool):
    plans = Fixed(b"a"), Fixed(b"b")
    for at, nbytes in ((0, PAGE), (1, PAGE), (1, 2 * PAGE), (0, PAGE)) * 3:
        lent, _ = lend(pool, 0, 0, nbytes, plans[at])
        assert lent.nbytes == nbytes
        assert any(ref() is lent for ref in plans[at].made)


def test_nothing_is_made_ahead_for_leaves_that_depend_on_the_bytes_nor_under_inference_mode(pool: Pool):
    mixed, plain = Fixed(plain=False), Fixed()
    for number in range(5):
        lend(pool, number, 0, plan=mixed)
    assert len(mixed.made) == 5
    for number in range(5):
        with torch.inference_mode():
            lend(pool, number, 1, plan=plain)
    assert len(plain.made) == 5
    for number in range(5):
        _, _, made, _ = pool.lend(number, pool.regions[1], (1, 0, 1, PAGE, PAGE), plain)
        assert not any(tensor.is_inference() for tensor in made)


def test_batches_of_very_many_leaves_are_made_one_at_a_time(pool: Pool):
    plan = Fixed()
    plan.num_leaves = MAX_LEAVES
    for number in range(5):
        lend(pool, number, 0, plan=plan)
    assert len(plan.made) == 5


def test_a_batch_of_which_nothing_can_be_made_comes_back_like_any_other(pool: Pool):
    _, lease, _, _ = views = pool.lend_unseen(4, (1, 0, 1, PAGE, 100))
    assert books(pool) == {4: (1, PAGE, PAGE)}
    lease.tail = pool.tail
    del lease, views
    assert ended(pool) == [4]
    assert books(pool) == {}


def test_the_end_of_a_lease_leaves_a_new_one_of_its_number_in_the_books(pool: Pool):
    """The receiver may use the number anew before the end has taken it out, where another thread takes batches."""
    first = taken(pool, 5, page=0)
    second = taken(pool, 5, page=1)
    del first
    assert books(pool) == {5: (1, PAGE, PAGE)}
    del second
    assert books(pool) == {}


def test_nothing_refers_to_the_books_once_the_pool_is_cut_off(pool: Pool):
    held = taken(pool, 1, page=0)
    pool.tail.cut()
    assert books(pool) == {}, "a lease refers to its tail, and that to the books: a cycle otherwise"
    del held


def test_views_made_ahead_end_no_lease_and_are_bounded(pool: Pool):
    plan = Fixed()
    for _ in range(3):
        for at in range(2 * MAX_PLACES):
            pool.lend(0, pool.regions[1], (1, 0, 1, 64 * at, PAGE), plan)
            pool.forget(0)
    for _ in range(2):
        lend(pool, 0, 1, plan=plan)
        pool.forget(0)
    assert 0 < plan.kept <= MAX_PLACES * MADE_TOGETHER
    pool.drop_spares()
    assert plan.kept == 0
    assert not ended(pool)
    assert books(pool) == {}


def test_the_wake_up_of_the_receiver_is_open_while_a_lease_may_end(pool: Pool):
    """Another thread may be within the end of a lease when the pool goes: its descriptor's number is not another's."""
    lent, tail = taken(pool, 1, page=0), pool.tail
    descriptor = tail._fd
    tail.cut()
    tail.words[W_WANT] = 1
    tail.wake()
    assert os.eventfd_read(descriptor) == 1
    tail.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    del lent
