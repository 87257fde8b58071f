"""The feeder's machine under any order of frames, builds, sends and lost links."""

from __future__ import annotations

from feeding_machine import A, B, all_free, ask, which
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import Announce, Fail, Job, Lost, Send, State, Withdraw


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
            if isinstance(instruction, (Send, Fail, Lost)):
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
        bundle=st.sampled_from([A, B]),
        room=st.sampled_from([0, 50, 100]),
    )
    def ticket(self, link: int, stream: int, ticket: int, bundle: bytes, room: int) -> None:
        if link in self.links:
            key = (link, stream, ticket)
            self.asked[key] = self.asked.get(key, 0) + 1
            self.follow(ask(self.m, ticket, link=link, stream=stream, room=room, bundle=bundle))

    @rule(
        link=st.integers(1, 3),
        stream=st.integers(1, 2),
        ticket=st.integers(0, 6),
        room=st.sampled_from([0, 100]),
    )
    def grant(self, link: int, stream: int, ticket: int, room: int) -> None:
        self.follow(self.m.grant(**which(ticket, link=link, stream=stream), room=room))

    @rule(link=st.integers(1, 3), stream=st.integers(1, 2), ticket=st.integers(0, 6))
    def cancel(self, link: int, stream: int, ticket: int) -> None:
        self.follow(self.m.cancel(**which(ticket, link=link, stream=stream)))

    @rule(bundle=st.sampled_from([A, B]))
    def bundle_frame(self, bundle: bytes) -> None:
        if self.m.bundle_coming(bundle):
            assert bundle not in self.fetching
            self.fetching.add(bundle)

    @rule(bundle=st.sampled_from([A, B]), fine=st.booleans())
    def fetched(self, bundle: bytes, fine: bool) -> None:
        if bundle in self.fetching:
            self.fetching.remove(bundle)
            if fine:
                self.m.bundle_ready(bundle)
            else:
                self.follow(self.m.bundle_lost(bundle))

    @rule(bundle=st.sampled_from([A, B]))
    def forget(self, bundle: bytes) -> None:
        if bundle not in self.fetching:
            self.m.forget_bundle(bundle)

    @precondition(lambda self: self.building is None)
    @rule()
    def build(self) -> None:
        self.building = self.m.next_build(all_free)

    @precondition(lambda self: self.building is not None)
    @rule(nbytes=st.sampled_from([10, 60, 200]), how=st.sampled_from(["built", "failed", "lost"]))
    def built(self, nbytes: int, how: str) -> None:
        job, self.building = self.building, None
        assert job is not None
        if how == "failed":
            self.follow(self.m.failed(job))
        elif how == "lost":
            self.follow(self.m.lost(job))
        else:
            job.body = "body"
            self.follow(self.m.built(job, nbytes))

    @rule(bundle=st.sampled_from([A, B]))
    def bundle_failed(self, bundle: bytes) -> None:
        self.follow(self.m.bundle_failed(bundle))

    @rule(link=st.integers(1, 3), bundle=st.sampled_from([A, B]))
    def release(self, link: int, bundle: bytes) -> None:
        self.m.release(link, bundle)

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
        assert self.m.next_build(all_free) is None


TestFeeder = Feeder.TestCase
TestFeeder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
