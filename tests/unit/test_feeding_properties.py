"""The feeder's machine under any order of frames, builds, sends and lost links."""

from __future__ import annotations

from feeding_machine import A, B, all_free, ask, which
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import Announce, Fail, Lost, Send, Task, TaskState, Withdraw


class Feeder(RuleBasedStateMachine):
    """Any order of frames, builds, sends and lost links."""

    def __init__(self) -> None:
        super().__init__()
        self.m = Feeding(2)
        self.receivers: set[int] = set()
        self.building: Task | None = None
        self.output: dict[int, list[Task]] = {}
        self.sending: dict[int, Task] = {}
        self.asked: dict[tuple[int, int, int], int] = {}
        self.answers: dict[tuple[int, int, int], int] = {}
        self.fetching: set[bytes] = set()

    def follow(self, made) -> None:
        for instruction in made:
            task = instruction.task
            assert task.receiver in self.receivers
            if isinstance(instruction, Send):
                assert task.body == "body"
                assert task not in self.output[task.receiver]
                self.output[task.receiver].append(task)
            elif isinstance(instruction, Withdraw):
                self.output[task.receiver].remove(task)
            elif isinstance(instruction, Announce):
                assert task.nbytes > task.room
            if isinstance(instruction, (Send, Fail, Lost)):
                key = (task.receiver, task.stream, task.ticket)
                self.answers[key] = self.answers.get(key, 0) + 1
                assert self.answers[key] <= self.asked[key], "nothing is sent that was not asked for"

    @rule(receiver=st.integers(1, 3))
    def open(self, receiver: int) -> None:
        if receiver not in self.receivers:
            self.receivers.add(receiver)
            self.output[receiver] = []
            self.asked = {k: n for k, n in self.asked.items() if k[0] != receiver}
            self.answers = {k: n for k, n in self.answers.items() if k[0] != receiver}
            self.m.opened(receiver)

    @rule(receiver=st.integers(1, 3))
    def close(self, receiver: int) -> None:
        self.m.closed(receiver)
        self.receivers.discard(receiver)
        self.output.pop(receiver, None)
        self.sending.pop(receiver, None)

    @rule(
        receiver=st.integers(1, 3),
        stream=st.integers(1, 2),
        ticket=st.integers(0, 6),
        bundle=st.sampled_from([A, B]),
        room=st.sampled_from([0, 50, 100]),
    )
    def ticket(self, receiver: int, stream: int, ticket: int, bundle: bytes, room: int) -> None:
        if receiver in self.receivers:
            key = (receiver, stream, ticket)
            self.asked[key] = self.asked.get(key, 0) + 1
            self.follow(ask(self.m, ticket, receiver=receiver, stream=stream, room=room, bundle=bundle))

    @rule(
        receiver=st.integers(1, 3),
        stream=st.integers(1, 2),
        ticket=st.integers(0, 6),
        room=st.sampled_from([0, 100]),
    )
    def grant(self, receiver: int, stream: int, ticket: int, room: int) -> None:
        self.follow(self.m.grant(**which(ticket, receiver=receiver, stream=stream), room=room))

    @rule(receiver=st.integers(1, 3), stream=st.integers(1, 2), ticket=st.integers(0, 6))
    def cancel(self, receiver: int, stream: int, ticket: int) -> None:
        self.follow(self.m.cancel(**which(ticket, receiver=receiver, stream=stream)))

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
        task, self.building = self.building, None
        assert task is not None
        if how == "failed":
            self.follow(self.m.failed(task))
        elif how == "lost":
            self.follow(self.m.lost(task))
        else:
            task.body = "body"
            self.follow(self.m.built(task, nbytes))

    @rule(bundle=st.sampled_from([A, B]))
    def bundle_failed(self, bundle: bytes) -> None:
        self.follow(self.m.bundle_failed(bundle))

    @rule(receiver=st.integers(1, 3), bundle=st.sampled_from([A, B]))
    def release(self, receiver: int, bundle: bytes) -> None:
        self.m.release(receiver, bundle)

    @rule(receiver=st.integers(1, 3))
    def start_or_end_of_a_body(self, receiver: int) -> None:
        if receiver in self.sending:
            self.m.sent(self.sending.pop(receiver))
        elif self.output.get(receiver):
            task = self.output[receiver].pop(0)
            self.m.started(task)
            self.sending[receiver] = task

    @invariant()
    def load_counts_what_is_not_built(self) -> None:
        unbuilt = sum(
            task.state in (TaskState.PARKED, TaskState.QUEUED, TaskState.BUILDING)
            for owner in self.m._receivers.values()
            for task in owner.tasks.values()
        )
        discarded = self.building is not None and self.building.state is TaskState.DISCARDED
        assert self.m.load == unbuilt + discarded

    @invariant()
    def bodies_are_bounded(self) -> None:
        for owner in self.m._receivers.values():
            assert len(owner.unsent) <= 2 + 2 * 7, "granted ones, too"
            for stream in (1, 2):
                held = [j.ticket for j in owner.held if j.stream == stream]
                assert len(held) == len(set(held))

    def teardown(self) -> None:
        """Everything ends when the receivers go and the build is over."""
        for receiver in list(self.receivers):
            self.close(receiver)
        if self.building is not None:
            assert self.m.built(self.building, 1) == []
        assert self.m.idle
        assert not self.m._parked
        assert self.m.next_build(all_free) is None


TestFeeder = Feeder.TestCase
TestFeeder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
