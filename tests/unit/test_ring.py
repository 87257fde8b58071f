"""The trainer's books of what it holds: what a new sidecar is told to leave alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from dataloaderjob.core.control import Control, seal
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.trainer.ring import Ring, map_region

PAGE = 4096
NBYTES = 16 * PAGE


@pytest.fixture
def ring() -> Iterator[Ring]:
    control, wake = Control.create(), os.eventfd(0)
    fd = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    seal(fd)
    made = Ring(Control(control), wake)
    made.lease_limit = NBYTES
    made.regions[1] = map_region(1, NBYTES, False, fd)
    yield made
    made.drop(1)
    os.close(control)
    os.close(wake)


def taken(ring: Ring, number: int, page: int, nbytes: int = PAGE):
    lease = ring.lend(number, (1, 0, 1, page * PAGE, nbytes))
    lease.tail = ring.tail
    return lease


def test_a_lease_that_ended_and_one_with_its_number_are_told_apart(ring: Ring):
    """The receiver uses a number anew as soon as it sees the end, which the trainer may not have noted yet."""
    first = taken(ring, 5, page=0)
    del first
    second = taken(ring, 5, page=3)
    ring.settle()
    assert ring.leases == {5: (1, 3 * PAGE, PAGE)}
    assert ring.leased_nbytes == PAGE
    del second
    ring.settle()
    assert ring.leases == {}
    assert ring.leased_nbytes == 0


def test_a_lease_ends_with_its_last_view_and_not_before(ring: Ring):
    lease = taken(ring, 7, page=1)
    view = np.ndarray((4,), np.int64, lease, 64)
    part = lease[8:16]
    del lease
    assert not ring.tail.log
    del view
    assert not ring.tail.log
    del part
    assert list(ring.tail.log) == [7]
    assert ring.tail.ended is not None
    assert ring.tail.ended[7] == 1


def test_a_lease_that_was_not_begun_does_not_end(ring: Ring):
    lease = ring.lend(3, (1, 0, 1, 0, PAGE))
    del lease
    assert not ring.tail.log
    assert taken(ring, 3, page=0).nbytes == PAGE, "it is lent again"


def test_an_entry_beyond_its_region_is_refused(ring: Ring):
    with pytest.raises(RemoteProtocolError, match="of a region of 65536"):
        ring.lend(1, (1, 0, 1, NBYTES - PAGE, PAGE + 1))
