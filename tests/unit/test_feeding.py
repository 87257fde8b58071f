"""The feeder's machine: what it does with tickets, grants, cancels, bundles and lost receivers."""

from __future__ import annotations

import pytest
from feeding_machine import A, B, all_free, ask, build, machine, send, which

from dataloaderjob.feeder.feeding_states import (
    TRANSITIONS,
    Announce,
    Fail,
    IllegalTransition,
    Lost,
    NeedBundle,
    Send,
    TaskEvent,
    TaskState,
    Withdraw,
)


def test_batch_that_fits_its_room_is_sent_without_a_grant():
    m = machine()
    assert ask(m, 0, room=10) == []
    task, made = build(m, 10)
    assert made == [Send(task)]
    send(m, task)
    assert m.idle


def test_a_batch_larger_than_its_room_is_announced_and_sent_when_granted():
    m = machine()
    ask(m, 0, room=9)
    task, made = build(m, 10)
    assert made == [Announce(task)]
    assert not m.idle
    assert m.grant(**which(0), room=10) == [Send(task)]
    assert m.grant(**which(0), room=10) == [], "a second grant means nothing"


def test_unknown_bundle_is_requested_once_per_link():
    m = machine(1, 2, known=None)
    asked = [ask(m, 0), ask(m, 1), ask(m, 0, receiver=2)]
    assert [[type(i) for i in made] for made in asked] == [[NeedBundle], [], [NeedBundle]]
    assert m.next_build(all_free) is None
    assert m.bundle_coming(A)
    assert not m.bundle_coming(A), "two receivers answer; one load is enough"
    m.bundle_ready(A)
    assert m.next_build(all_free) is not None


def test_builders_of_different_bundles_work_concurrently():
    m = machine()
    m.bundle_ready(B)
    ask(m, 0)
    ask(m, 1)
    ask(m, 0, stream=2, bundle=B)
    busy: set[bytes] = set()
    tasks = []
    while (task := m.next_build(lambda task: task.bundle not in busy)) is not None:
        busy.add(task.bundle)
        tasks.append((task.stream, task.ticket))
    assert sorted(tasks) == [(1, 0), (2, 0)]
    assert m.load == 3


def test_ticket_with_a_dead_builder_is_reported_lost_and_can_be_retried():
    m = machine()
    ask(m, 0)
    task = m.next_build(all_free)
    assert task is not None
    assert m.lost(task) == [Lost(task)]
    assert m.idle
    ask(m, 0)
    assert build(m)[1]


def test_cancelled_ticket_with_a_dead_builder_is_not_reported():
    m = machine()
    ask(m, 0)
    task = m.next_build(all_free)
    assert task is not None
    m.cancel(**which(0))
    assert m.lost(task) == []
    assert m.idle


def test_a_bundle_that_cannot_be_loaded_fails_the_tickets_that_wait_for_it():
    m = machine(1, 2)
    ask(m, 0)
    ask(m, 1)
    ask(m, 0, receiver=2)
    failed = m.bundle_failed(A)
    assert sorted((f.task.receiver, f.task.ticket) for f in failed) == [(1, 0), (1, 1), (2, 0)]
    assert m.idle
    ask(m, 2)
    assert m.next_build(all_free) is not None, "its blobs are still here"


def test_bundle_is_used_until_every_link_has_released_it_or_closed():
    m = machine(1, 2)
    ask(m, 0)
    ask(m, 0, receiver=2)
    m.release(1, A)
    assert m.used(A)
    m.closed(2)
    assert not m.used(A)


def test_bodies_are_freed_once_sent_or_cancelled():
    m = machine()
    ask(m, 0)
    ask(m, 1)
    for name in ("sent", "cancelled"):
        task = m.next_build(all_free)
        assert task is not None
        task.body = name
        m.built(task, 10)
        if name == "sent":
            send(m, task)
        else:
            m.cancel(**which(1))
    assert m.freed == ["sent", "cancelled"]


def test_unavailable_bundle_fails_its_tickets_and_is_requested_again():
    m = machine(known=None)
    ask(m, 0)
    m.bundle_coming(A)
    (failed,) = m.bundle_lost(A)
    assert isinstance(failed, Fail)
    assert failed.task.ticket == 0
    assert isinstance(ask(m, 1)[0], NeedBundle)


def test_bundle_arriving_after_its_tickets_were_cancelled_is_not_loaded():
    m = machine(known=None)
    ask(m, 0)
    m.cancel(**which(0))
    assert not m.wanted(A)
    assert not m.bundle_coming(A)


@pytest.mark.parametrize("stage", ["parked", "queued", "held", "ready"])
def test_a_cancelled_ticket_is_forgotten_before_its_body_has_begun(stage: str):
    m = machine(known=None if stage == "parked" else A)
    ask(m, 0, room=100 if stage == "ready" else 0)
    task = None
    if stage in ("held", "ready"):
        task, _ = build(m)
        task.body = object()
    made = m.cancel(**which(0))
    assert made == ([Withdraw(task)] if stage == "ready" else [])
    assert m.idle
    assert m.next_build(all_free) is None
    assert task is None or task.body is None


def test_body_already_begun_is_finished_despite_cancellation():
    m = machine()
    ask(m, 0)
    task, _ = build(m)
    m.started(task)
    assert m.cancel(**which(0)) == []
    assert not m.idle
    m.sent(task)
    assert m.idle


def test_ticket_cancelled_during_its_build_is_dropped_and_can_be_retried():
    m = machine()
    ask(m, 0)
    task = m.next_build(all_free)
    assert task is not None
    m.cancel(**which(0))
    ask(m, 0)
    assert m.built(task, 10) == []
    again, made = build(m)
    assert again is not task
    assert made == [Send(again)]


def test_grant_for_a_repeated_ticket_gives_it_room():
    m = machine()
    ask(m, 0, room=0)
    build(m)
    m.cancel(**which(0))
    ask(m, 0, room=0)
    assert m.grant(**which(0), room=10) == []
    task, made = build(m, 10)
    assert made == [Send(task)]


def test_repeated_ticket_only_raises_its_room():
    m = machine()
    ask(m, 0, room=0)
    task, _ = build(m)
    assert ask(m, 0, room=10) == [Send(task)]
    assert m.next_build(all_free) is None


def test_link_with_two_ungranted_batches_gets_no_build_and_others_do():
    m = machine(1, 2)
    for ticket in range(4):
        ask(m, ticket, room=0)
    ask(m, 0, receiver=2, room=0)
    receivers = []
    while (task := m.next_build(all_free)) is not None:
        receivers.append(task.receiver)
        m.built(task, 10)
    assert sorted(receivers) == [1, 1, 2]
    m.grant(**which(0), room=10)
    task = m.next_build(all_free)
    assert task is not None
    assert task.ticket == 2


def test_link_with_two_unsent_bodies_gets_no_build():
    m = machine()
    for ticket in range(3):
        ask(m, ticket)
    first, _ = build(m)
    build(m)
    assert m.next_build(all_free) is None
    send(m, first)
    assert m.next_build(all_free) is not None


def test_ticket_before_all_held_ones_is_built_though_the_link_is_full():
    m = machine()
    for ticket in (5, 6, 7):
        ask(m, ticket, room=0)
    build(m)
    build(m)
    assert m.next_build(all_free) is None
    ask(m, 4, room=0)
    task = m.next_build(all_free)
    assert task is not None
    assert task.ticket == 4


def test_stream_without_held_batches_is_not_blocked_by_another():
    m = machine()
    for ticket in range(3):
        ask(m, ticket, room=0, stream=1)
    build(m)
    build(m)
    ask(m, 0, room=0, stream=2)
    task = m.next_build(all_free)
    assert task is not None
    assert task.stream == 2


def test_builds_rotate_over_links_and_follow_tickets_within_a_stream():
    m = machine(1, 2, limit=100)
    for ticket in (2, 0, 1):
        ask(m, ticket, receiver=1)
        ask(m, ticket, receiver=2)
    order = []
    while (task := m.next_build(all_free)) is not None:
        m.built(task, 10)
        order.append((task.receiver, task.ticket))
    assert order == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]


def test_lost_link_drops_its_tickets_and_the_build_under_way():
    m = machine(1, 2)
    ask(m, 0)
    ask(m, 1)
    task = m.next_build(all_free)
    assert task is not None
    m.closed(1)
    m.closed(1)
    assert m.load == 1, "the build goes on to its end"
    assert m.built(task, 10) == []
    assert m.idle
    assert m.next_build(all_free) is None


def test_failure_is_reported_unless_the_ticket_was_cancelled():
    m = machine()
    ask(m, 0)
    ask(m, 1)
    first, second = m.next_build(all_free), None
    assert first is not None
    assert m.failed(first) == [Fail(first)]
    second = m.next_build(all_free)
    assert second is not None
    m.cancel(**which(1))
    assert m.failed(second) == []
    assert m.idle


def test_invalid_step_is_refused_with_its_history():
    m = machine()
    ask(m, 0)
    task, _ = build(m)
    send(m, task)
    with pytest.raises(IllegalTransition, match=r"cannot handle START.*BUILD.*FITS.*START.*SENT"):
        m.started(task)


def test_every_reachable_state_handles_cancel_and_grant():
    met = {TaskState.PARKED, TaskState.QUEUED, TaskState.BUILDING, TaskState.HELD, TaskState.READY}
    assert {(s, e) for s in met for e in (TaskEvent.GRANT, TaskEvent.CANCEL)} <= set(TRANSITIONS)
