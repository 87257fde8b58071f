"""The control memory: what is published is found, nothing else is, and no wake-up is lost."""

from __future__ import annotations

import os
import select
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaderjob.core import control as ctl
from dataloaderjob.core.control import FAILED, THERE, Control, sealed

ROUNDS = 30_000


@pytest.fixture
def pair():
    fd = Control.create()
    yield Control(fd), Control(fd)
    os.close(fd)


@settings(max_examples=200, deadline=None)
@given(
    lease=st.integers(0, ctl.LEASES - 1),
    stream=st.integers(0, 2**32 - 1),
    ticket=st.integers(0, 2**32 - 2),
    region=st.integers(0, 2**32),
    offset=st.integers(0, 2**40),
    nbytes=st.integers(0, 2**40),
)
def test_a_published_batch_is_found_under_its_stream_and_ticket_only(
    lease, stream, ticket, region, offset, nbytes
):
    fd = Control.create()
    receiver, trainer = Control(fd), Control(fd)
    assert trainer.ready(stream, ticket) is None
    assert receiver.publish(lease, stream, ticket, region, offset, nbytes) is False
    assert trainer.ready(stream, ticket) == lease
    assert trainer.entry(lease) == (stream, ticket, region, offset, nbytes)
    assert trainer.ready(stream, ticket + ctl.WINDOW) is None
    assert trainer.ready(stream + ctl.ROWS, ticket) is None
    receiver.unpublish(stream, ticket)
    assert trainer.ready(stream, ticket) is None
    os.close(fd)


def test_row_left_by_an_earlier_stream_is_not_read_by_a_new_one(pair):
    receiver, trainer = pair
    receiver.publish(3, 5, 7, 1, 0, 10)
    assert trainer.ready(5 + ctl.ROWS, 7) is None


def test_row_of_the_stream_65536_before_is_cleared_on_opening(pair):
    receiver, trainer = pair
    receiver.publish(3, 1, 500, 1, 0, 10)
    receiver.publish(4, 2, 500, 1, 0, 10)
    trainer.clear_row(1 + 0x10000)
    assert trainer.find(1 + 0x10000, 500) is None
    assert trainer.ready(1 + 0x10000, 500) is None
    assert trainer.ready(2, 500) == 4, "the other rows are as they were"


def test_failed_ticket_is_published_instead_of_a_lease(pair):
    receiver, trainer = pair
    receiver.publish_word(FAILED, 1, 2)
    assert trainer.ready(1, 2) == FAILED


def test_existence_of_a_batch_is_published_instead_of_a_lease(pair):
    receiver, trainer = pair
    receiver.publish_word(THERE, 1, 2)
    assert trainer.find(1, 2) == (THERE, None)


@given(st.sets(st.integers(0, 300), max_size=40))
def test_each_ended_lease_is_reported_once(leases):
    fd = Control.create()
    receiver, trainer = Control(fd), Control(fd)
    for lease in leases:
        trainer.ended[lease] = 1
    assert set(receiver.ended_leases(200)) == {n for n in leases if n <= 200}
    assert set(receiver.ended_leases(300)) == {n for n in leases if n > 200}
    assert not list(receiver.ended_leases(300))
    os.close(fd)


def test_adoption_keeps_the_ends_of_the_named_leases(pair):
    receiver, trainer = pair
    receiver.publish(4, 1, 0, 1, 0, 10)
    trainer.ended[4] = trainer.ended[9] = 1
    receiver.reset({4})
    assert trainer.ready(1, 0) is None
    assert list(receiver.ended_leases(100)) == [4]


def test_the_memory_is_sealed_against_resizing():
    fd = Control.create()
    assert sealed(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    os.close(fd)


def test_trainer_sleeping_for_several_batches_wakes_at_the_last():
    fd = Control.create()
    receiver, trainer = Control(fd), Control(fd)
    assert not receiver.publish(0, 1, 0, 1, 0, 1), "it is awake"
    assert trainer.sleep(1, 1, after=3)
    assert [receiver.publish(n, 1, n, 1, 0, 1) for n in (1, 2, 3, 4)] == [False, False, True, True]
    trainer.awake()
    assert not receiver.publish(5, 1, 5, 1, 0, 1)
    assert not trainer.sleep(1, 5), "it is there"
    os.close(fd)


def test_threads_sleeping_together_wake_at_the_next_batch():
    fd = Control.create()
    receiver, trainer = Control(fd), Control(fd)
    assert trainer.sleep(1, 0, after=3)
    assert trainer.twin().sleep(2, 0, after=0)
    assert receiver.publish(0, 1, 0, 1, 0, 1)
    os.close(fd)


def _sleeper(control: Control, wake: int, acknowledge: int) -> int:
    """Waits for each ticket as the trainer does; returns how often it was ready and nobody woke us."""
    lost = 0
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    for ticket in range(ROUNDS):
        while control.ready(1, ticket) is None:
            if control.sleep(1, ticket):
                if poll.poll(2000):
                    os.eventfd_read(wake)
                elif control.ready(1, ticket) is not None:
                    lost += 1
            control.awake()
        os.eventfd_write(acknowledge, 1)
    return lost


@pytest.mark.parametrize("spin", [0, 3, 40], ids=["at once", "a little later", "later"])
def test_no_wake_up_is_lost_between_two_processes(spin):
    """The litmus test: publish and look at the flag, against set the flag and look at what is published."""
    fd = Control.create()
    wake, acknowledge = os.eventfd(0), os.eventfd(0)
    child = os.fork()
    if child == 0:
        code = 255
        try:
            code = min(_sleeper(Control(fd), wake, acknowledge), 254)
        finally:
            os._exit(code)
    receiver = Control(fd)
    answered = select.poll()
    answered.register(acknowledge, select.POLLIN)
    began = time.monotonic()
    for ticket in range(ROUNDS):
        for _ in range(spin):
            pass
        if receiver.publish(ticket % 100, 1, ticket, 1, 0, 1):
            os.eventfd_write(wake, 1)
        assert answered.poll(20_000), "the sleeper has ended"
        os.eventfd_read(acknowledge)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert time.monotonic() - began < 120
    for descriptor in (fd, wake, acknowledge):
        os.close(descriptor)
