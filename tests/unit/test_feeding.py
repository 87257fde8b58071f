"""The feeder's machine: what it does with tickets, grants, cancels, specs and lost links."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataloaderjob.core.feeding import Feeding
from dataloaderjob.core.feeding_states import (
    TRANSITIONS,
    Announce,
    Event,
    Fail,
    IllegalTransition,
    Job,
    NeedSpec,
    Send,
    State,
    Withdraw,
)

A, B = b"a" * 16, b"b" * 16


def machine(*links: int, limit: int = 2, known: bytes | None = A) -> Feeding:
    made = Feeding(limit)
    for link in links or (1,):
        made.opened(link)
    if known is not None:
        made.spec_ready(known)
    return made


def ask(m: Feeding, ticket: int, *, link: int = 1, stream: int = 1, room: int = 100, spec: bytes = A, generation: int = 1):
    return m.ticket(
        link, generation=generation, stream=stream, ticket=ticket, spec=spec, flags=0, room=room, payload=b""
    )


def build(m: Feeding, nbytes: int = 10):
    job = m.next_build()
    assert job is not None
    return job, m.built(job, nbytes)


def send(m: Feeding, job: Job) -> None:
    m.started(job)
    m.sent(job)


def which(ticket: int, *, link: int = 1, stream: int = 1, generation: int = 1) -> dict[str, int]:
    return {"link": link, "generation": generation, "stream": stream, "ticket": ticket}


def test_a_batch_that_fits_its_room_is_sent_unasked():
    m = machine()
    assert ask(m, 0, room=10) == []
    job, made = build(m, 10)
    assert made == [Send(job)]
    send(m, job)
    assert m.idle


def test_a_batch_larger_than_its_room_is_announced_and_sent_when_granted():
    m = machine()
    ask(m, 0, room=9)
    job, made = build(m, 10)
    assert made == [Announce(job)]
    assert not m.idle
    assert m.grant(**which(0), room=10) == [Send(job)]
    assert m.grant(**which(0), room=10) == [], "a second grant means nothing"


def test_an_unknown_spec_is_asked_for_once_for_each_link():
    m = machine(1, 2, known=None)
    asked = [ask(m, 0), ask(m, 1), ask(m, 0, link=2)]
    assert [[type(i) for i in made] for made in asked] == [[NeedSpec], [], [NeedSpec]]
    assert m.next_build() is None
    assert m.spec_coming(A)
    assert not m.spec_coming(A), "two receivers answer; one load is enough"
    m.spec_ready(A)
    assert m.next_build() is not None


def test_a_spec_that_cannot_be_had_fails_its_tickets_and_is_asked_for_again():
    m = machine(known=None)
    ask(m, 0)
    m.spec_coming(A)
    (failed,) = m.spec_lost(A)
    assert isinstance(failed, Fail)
    assert failed.job.ticket == 0
    assert isinstance(ask(m, 1)[0], NeedSpec)


def test_a_spec_that_came_after_its_tickets_were_cancelled_is_not_loaded():
    m = machine(known=None)
    ask(m, 0)
    m.cancel(**which(0))
    assert not m.wanted(A)
    assert not m.spec_coming(A)


@pytest.mark.parametrize("stage", ["parked", "queued", "held", "ready"])
def test_a_cancelled_ticket_is_forgotten_before_its_body_has_begun(stage: str):
    m = machine(known=None if stage == "parked" else A)
    ask(m, 0, room=100 if stage == "ready" else 0)
    job = None
    if stage in ("held", "ready"):
        job, _ = build(m)
        job.body = object()
    made = m.cancel(**which(0))
    assert made == ([Withdraw(job)] if stage == "ready" else [])
    assert m.idle
    assert m.next_build() is None
    assert job is None or job.body is None


def test_a_body_that_has_begun_is_finished_although_cancelled():
    m = machine()
    ask(m, 0)
    job, _ = build(m)
    m.started(job)
    assert m.cancel(**which(0)) == []
    assert not m.idle
    m.sent(job)
    assert m.idle


def test_a_ticket_cancelled_while_it_is_built_is_dropped_and_may_be_asked_again():
    m = machine()
    ask(m, 0)
    job = m.next_build()
    assert job is not None
    m.cancel(**which(0))
    ask(m, 0)
    assert m.built(job, 10) == []
    again, made = build(m)
    assert again is not job
    assert made == [Send(again)]


def test_a_grant_for_a_ticket_asked_again_is_room_for_it():
    m = machine()
    ask(m, 0, room=0)
    build(m)
    m.cancel(**which(0))
    ask(m, 0, room=0)
    assert m.grant(**which(0), room=10) == []
    job, made = build(m, 10)
    assert made == [Send(job)]


def test_the_same_ticket_again_only_raises_its_room():
    m = machine()
    ask(m, 0, room=0)
    job, _ = build(m)
    assert ask(m, 0, room=10) == [Send(job)]
    assert m.next_build() is None


def test_a_link_with_two_ungranted_batches_gets_nothing_built_and_others_do():
    m = machine(1, 2)
    for ticket in range(4):
        ask(m, ticket, room=0)
    ask(m, 0, link=2, room=0)
    links = []
    while (job := m.next_build()) is not None:
        links.append(job.link)
        m.built(job, 10)
    assert sorted(links) == [1, 1, 2]
    m.grant(**which(0), room=10)
    job = m.next_build()
    assert job is not None
    assert job.ticket == 2


def test_a_link_with_two_unsent_bodies_gets_nothing_built():
    m = machine()
    for ticket in range(3):
        ask(m, ticket)
    first, _ = build(m)
    build(m)
    assert m.next_build() is None
    send(m, first)
    assert m.next_build() is not None


def test_the_ticket_before_all_held_ones_is_built_although_the_link_is_full():
    m = machine()
    for ticket in (5, 6, 7):
        ask(m, ticket, room=0)
    build(m)
    build(m)
    assert m.next_build() is None
    ask(m, 4, room=0)
    job = m.next_build()
    assert job is not None
    assert job.ticket == 4


def test_a_stream_without_held_batches_is_not_stopped_by_another_stream():
    m = machine()
    for ticket in range(3):
        ask(m, ticket, room=0, stream=1)
    build(m)
    build(m)
    ask(m, 0, room=0, stream=2)
    job = m.next_build()
    assert job is not None
    assert job.stream == 2


def test_turns_go_round_robin_over_links_and_by_ticket_within_a_stream():
    m = machine(1, 2, limit=100)
    for ticket in (2, 0, 1):
        ask(m, ticket, link=1)
        ask(m, ticket, link=2)
    order = []
    while (job := m.next_build()) is not None:
        m.built(job, 10)
        order.append((job.link, job.ticket))
    assert order == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]


def test_a_new_generation_cancels_what_the_old_one_asked_and_old_frames_mean_nothing():
    m = machine()
    ask(m, 0, generation=1, room=0)
    job, _ = build(m)
    ask(m, 0, generation=2)
    assert job.state is State.GONE
    assert ask(m, 1, generation=1) == []
    assert m.grant(**which(0), room=10) == []
    assert m.load == 1


def test_a_lost_link_takes_its_tickets_along_and_what_is_being_built_is_dropped():
    m = machine(1, 2)
    ask(m, 0)
    ask(m, 1)
    job = m.next_build()
    assert job is not None
    m.closed(1)
    m.closed(1)
    assert m.load == 1, "the build goes on to its end"
    assert m.built(job, 10) == []
    assert m.idle
    assert m.next_build() is None


def test_a_failure_is_told_unless_the_ticket_was_cancelled():
    m = machine()
    ask(m, 0)
    ask(m, 1)
    first, second = m.next_build(), None
    assert first is not None
    assert m.failed(first) == [Fail(first)]
    second = m.next_build()
    assert second is not None
    m.cancel(**which(1))
    assert m.failed(second) == []
    assert m.idle


def test_a_step_that_the_table_lacks_is_refused_with_its_history():
    m = machine()
    ask(m, 0)
    job, _ = build(m)
    send(m, job)
    with pytest.raises(IllegalTransition, match=r"cannot take START.*BUILD.*FITS.*START.*SENT"):
        m.started(job)


def test_every_state_that_a_frame_can_meet_knows_cancel_and_grant():
    met = {State.PARKED, State.QUEUED, State.BUILDING, State.HELD, State.READY}
    assert {(s, e) for s in met for e in (Event.GRANT, Event.CANCEL)} <= set(TRANSITIONS)


class Feeder(RuleBasedStateMachine):
    """Any order of frames, builds, sends and lost links."""

    def __init__(self) -> None:
        super().__init__()
        self.m = Feeding(2)
        self.links: set[int] = set()
        self.building: Job | None = None
        self.output: dict[int, list[Job]] = {}
        self.sending: dict[int, Job] = {}
        self.asked: dict[tuple[int, int, int], int] = {}
        self.answers: dict[tuple[int, int, int], int] = {}
        self.fetching: set[bytes] = set()

    def follow(self, made) -> None:
        for instruction in made:
            job = instruction.job
            assert job.link in self.links
            if isinstance(instruction, Send):
                assert job.body == "body"
                assert job not in self.output[job.link]
                self.output[job.link].append(job)
            elif isinstance(instruction, Withdraw):
                self.output[job.link].remove(job)
            elif isinstance(instruction, Announce):
                assert job.nbytes > job.room
            if isinstance(instruction, (Send, Fail)):
                key = (job.link, job.stream, job.ticket)
                self.answers[key] = self.answers.get(key, 0) + 1
                assert self.answers[key] <= self.asked[key], "nothing is sent that was not asked for"

    @rule(link=st.integers(1, 3))
    def open(self, link: int) -> None:
        if link not in self.links:
            self.links.add(link)
            self.output[link] = []
            self.asked = {k: n for k, n in self.asked.items() if k[0] != link}
            self.answers = {k: n for k, n in self.answers.items() if k[0] != link}
            self.m.opened(link)

    @rule(link=st.integers(1, 3))
    def close(self, link: int) -> None:
        self.m.closed(link)
        self.links.discard(link)
        self.output.pop(link, None)
        self.sending.pop(link, None)

    @rule(
        link=st.integers(1, 3),
        stream=st.integers(1, 2),
        ticket=st.integers(0, 6),
        spec=st.sampled_from([A, B]),
        room=st.sampled_from([0, 50, 100]),
    )
    def ticket(self, link: int, stream: int, ticket: int, spec: bytes, room: int) -> None:
        if link in self.links:
            key = (link, stream, ticket)
            self.asked[key] = self.asked.get(key, 0) + 1
            self.follow(ask(self.m, ticket, link=link, stream=stream, room=room, spec=spec))

    @rule(link=st.integers(1, 3), stream=st.integers(1, 2), ticket=st.integers(0, 6), room=st.sampled_from([0, 100]))
    def grant(self, link: int, stream: int, ticket: int, room: int) -> None:
        self.follow(self.m.grant(**which(ticket, link=link, stream=stream), room=room))

    @rule(link=st.integers(1, 3), stream=st.integers(1, 2), ticket=st.integers(0, 6))
    def cancel(self, link: int, stream: int, ticket: int) -> None:
        self.follow(self.m.cancel(**which(ticket, link=link, stream=stream)))

    @rule(spec=st.sampled_from([A, B]))
    def spec_frame(self, spec: bytes) -> None:
        if self.m.spec_coming(spec):
            assert spec not in self.fetching
            self.fetching.add(spec)

    @rule(spec=st.sampled_from([A, B]), fine=st.booleans())
    def fetched(self, spec: bytes, fine: bool) -> None:
        if spec in self.fetching:
            self.fetching.remove(spec)
            if fine:
                self.m.spec_ready(spec)
            else:
                self.follow(self.m.spec_lost(spec))

    @rule(spec=st.sampled_from([A, B]))
    def forget(self, spec: bytes) -> None:
        if spec not in self.fetching:
            self.m.forget_spec(spec)

    @precondition(lambda self: self.building is None)
    @rule()
    def build(self) -> None:
        self.building = self.m.next_build()

    @precondition(lambda self: self.building is not None)
    @rule(nbytes=st.sampled_from([10, 60, 200]), fails=st.booleans())
    def built(self, nbytes: int, fails: bool) -> None:
        job, self.building = self.building, None
        assert job is not None
        if fails:
            self.follow(self.m.failed(job))
        else:
            job.body = "body"
            self.follow(self.m.built(job, nbytes))

    @rule(link=st.integers(1, 3))
    def start_or_end_of_a_body(self, link: int) -> None:
        if link in self.sending:
            self.m.sent(self.sending.pop(link))
        elif self.output.get(link):
            job = self.output[link].pop(0)
            self.m.started(job)
            self.sending[link] = job

    @invariant()
    def load_counts_what_is_not_built(self) -> None:
        unbuilt = sum(
            job.state in (State.PARKED, State.QUEUED, State.BUILDING)
            for owner in self.m._links.values()
            for job in owner.jobs.values()
        )
        discarded = self.building is not None and self.building.state is State.DISCARDED
        assert self.m.load == unbuilt + discarded

    @invariant()
    def bodies_are_bounded(self) -> None:
        for owner in self.m._links.values():
            assert len(owner.unsent) <= 2 + 2 * 7, "granted ones, too"
            for stream in (1, 2):
                held = [j.ticket for j in owner.held if j.stream == stream]
                assert len(held) == len(set(held))

    def teardown(self) -> None:
        """Everything ends when the receivers go and the build is over."""
        for link in list(self.links):
            self.close(link)
        if self.building is not None:
            assert self.m.built(self.building, 1) == []
        assert self.m.idle
        assert not self.m._parked
        assert self.m.next_build() is None


TestFeeder = Feeder.TestCase
TestFeeder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
