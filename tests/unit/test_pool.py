"""The trainer's books of what it holds: what a new sidecar is told to leave alone."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dataloaderjob.core.control import W_WANT, Control, seal
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.trainer.session import pool as pools
from dataloaderjob.trainer.session.attach import Opened
from dataloaderjob.trainer.session.pool import Pool, map_region

PAGE = 4096
NBYTES = 16 * PAGE


@pytest.fixture
def pool() -> Iterator[Pool]:
    control = Control.create()
    made = pool_of(control, os.eventfd(0))
    yield made
    made.drop(1)
    os.close(control)


def pool_of(control: int, wake: int) -> Pool:
    fd = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    seal(fd)
    made = Pool(Control(control), wake)
    made.limit(NBYTES)
    made.regions[1] = map_region(1, NBYTES, False, fd)
    return made


def taken(pool: Pool, number: int, page: int, nbytes: int = PAGE):
    return pool.lend(number, pool.regions[1], (1, 0, 1, page * PAGE, nbytes))


def books(pool: Pool):
    return {number: place[:3] for number, place in pool.leases.items()}


def ended(pool: Pool):
    assert pool.tail.ended is not None
    return [number for number in range(20) if pool.tail.ended[number]]


def test_ended_lease_and_a_new_one_of_its_number_are_distinguished(pool: Pool):
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


def test_lease_ends_exactly_with_its_last_view(pool: Pool):
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


def test_leases_ending_on_other_threads_leave_no_entries(pool: Pool):
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


def test_number_of_surely_allowed_leases_follows_the_largest_one(pool: Pool):
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
    with pytest.raises(RemoteProtocolError, match="of a 65536-byte region"):
        taken(pool, 1, page=15, nbytes=PAGE + 1)
    assert books(pool) == {}


def test_undecodable_batch_is_returned_like_any_other(pool: Pool):
    pool.give_back(4)
    assert ended(pool) == [4]
    assert books(pool) == {}


def test_end_of_a_lease_keeps_a_new_one_of_its_number(pool: Pool):
    """The receiver may use the number anew before the end has taken it out, where another thread takes batches."""
    first = taken(pool, 5, page=0)
    second = taken(pool, 5, page=1)
    del first
    assert books(pool) == {5: (1, PAGE, PAGE)}
    del second
    assert books(pool) == {}


def test_end_in_progress_keeps_a_lease_created_meanwhile(pool: Pool):
    """The receiver has seen the end, and another thread lends its number, before the books are changed."""
    first = taken(pool, 5, page=0)
    lease = pool.leases[5][3]
    second = taken(pool, 5, page=1)
    pools._end(lease)
    assert books(pool) == {5: (1, PAGE, PAGE)}
    assert pool.leased_nbytes == PAGE
    del first, second


def test_no_reference_to_the_entries_remains_once_the_pool_is_cut_off(pool: Pool):
    held = taken(pool, 1, page=0)
    pool.tail.cut()
    assert books(pool) == {}, "a lease refers to its tail, and that to the books: a cycle otherwise"
    del held


def test_receivers_wake_up_stays_open_while_a_lease_may_end(pool: Pool):
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


def test_closed_client_keeps_the_wake_up_open_for_a_lease_being_ended():
    fds = [Control.create(), os.eventfd(0), os.eventfd(0)]
    made = pool_of(fds[0], fds[2])
    lent = taken(made, 1, page=0)
    lease = made.leases[1][3]  # a thread within its end has no more than this
    opened = Opened(fds=fds.copy(), pool=made)
    opened.close()
    del made, opened
    lease.tail.wake()
    assert os.eventfd_read(fds[2]) == 1
    del lease
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    del lent
