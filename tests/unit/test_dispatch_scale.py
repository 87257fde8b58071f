"""Many ranks and many feeders, in virtual time: who gets the work, what it costs, what a feeder keeps."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from fleet import Fleet

from dataloaderjob.core.frames import TICKET_DEPTH
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.dispatch.streams import Endpoint


def test_64_ranks_use_all_of_256_feeders_from_the_first_tickets():
    fleet = Fleet(64, 256, batches=40)
    first = fleet.asked_of(16)
    assert len(first) == 256, "each feeder is asked for one of the first tickets"
    assert max(first.values()) <= 2 * 64 * 16 / 256, "and none for more than twice its share"
    fleet.run()
    made = [feeder.made for feeder in fleet.feeders.values()]
    assert sum(made) == 64 * 40, "nothing was made twice"
    assert min(made) >= 0.7 * 64 * 40 / 256
    assert max(made) <= 1.3 * 64 * 40 / 256
    # Each feeder makes ten batches of 50 ms; a rank cannot finish sooner.
    assert fleet.now <= 1.5 * 10 * fleet.make_s


def test_8_ranks_on_64_feeders_share_them_evenly():
    fleet = Fleet(8, 64, batches=80)
    first = fleet.asked_of(16)
    assert len(first) >= 0.8 * 64
    assert max(first.values()) <= 2 * TICKET_DEPTH
    fleet.run()
    assert fleet.now <= 1.3 * 10 * fleet.make_s


def test_each_rank_uses_all_of_8_feeders_within_ten_tickets():
    fleet = Fleet(8, 8, batches=40)
    assert all(len(set(rank.askings[:10])) == 8 for rank in fleet.ranks)
    fleet.run()


def test_memory_kept_by_a_feeder_is_bounded_over_all_receivers():
    nbytes, most = 1 << 20, 8 << 20
    fleet = Fleet(64, 4, batches=6, nbytes=nbytes, make_s=0.001, most_nbytes=most)
    for feeder in fleet.feeders.values():
        feeder.machine.sent = lambda task: None  # type: ignore[method-assign]  # nobody takes anything in
    with pytest.raises((AssertionError, IndexError)):
        fleet.run(limit_s=20.0)
    kept = max(feeder.most_nbytes for feeder in fleet.feeders.values())
    assert most <= kept <= 64 * nbytes, "above the bound, a batch for each receiver that has none"


@pytest.mark.parametrize("feeders", [8, 64, 256])
def test_steps_of_a_ticket_do_not_depend_on_the_number_of_feeders(feeders: int):
    assert steps_of_a_ticket(feeders) <= 1.1 * steps_of_a_ticket(8) + 10


def steps_of_a_ticket(feeders: int) -> float:
    """Lines of Python that a ticket and its batch take in the dispatcher of one rank, once all feeders are full."""
    fleet = Fleet(1, feeders, batches=4 * feeders + 800, window=2 * feeders + 20, nbytes=4096)
    while fleet.ranks[0].taken < 2 * feeders:
        fleet.step()
    counters, count = fleet.ranks[0].machine.counters, 0
    begun = counters.batches

    def trace(frame, event, _):
        nonlocal count
        if "dispatch" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        while counters.batches < begun + 400 and not fleet.done:
            fleet.step()
    finally:
        sys.settrace(None)
    return count / (counters.batches - begun)


@pytest.mark.parametrize("held", [False, True])
def test_awaited_ticket_is_built_though_enough_is_built_for_all(held: bool):
    feeding = Feeding(2, most_nbytes=100)
    feeding.bundle_ready(bytes(16))
    about: dict[str, Any] = {"bundle": bytes(16), "flags": 0, "payload": b""}
    for receiver in range(3):
        feeding.opened(receiver)
        for ticket in (5, 6):
            feeding.ticket(receiver, stream=1, ticket=ticket, room=0 if held else 100, **about)
    for _ in range(3):  # one for each receiver, and no second one
        task = feeding.next_build(lambda _: True)
        assert task is not None
        feeding.built(task, 60)
    assert feeding.next_build(lambda _: True) is None
    for stream, ticket in ((1, 4), (2, 0)):  # before what is held of its stream, and of another stream
        feeding.ticket(0, stream=stream, ticket=ticket, room=100, **about)
        task = feeding.next_build(lambda _: True)
        assert (task is not None) is held, "what is on its way has its room: it goes first"
        if task is not None:
            assert (task.stream, task.ticket) == (stream, ticket)
            feeding.started(task) if feeding.built(task, 10) else None
            feeding.sent(task)


def test_list_of_feeders_starts_elsewhere_for_each_rank():
    def first(rank: int) -> str:
        machine = Dispatcher(LoaderSettings(), rank=rank)
        machine.set_feeders(0.0, [Endpoint(f"feeder-{n}", f"i{n}", "h", n) for n in range(64)])
        return str(machine.take()[0].endpoint.instance)  # type: ignore[union-attr]

    assert len({first(rank) for rank in range(8)}) == 8
