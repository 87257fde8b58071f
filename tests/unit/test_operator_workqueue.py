"""The order and the times at which jobs are due, in virtual time."""

from __future__ import annotations

import itertools
import random

from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataloaderjob_operator.workqueue import BACKOFF, EVENT_WAIT_S, FOLLOWING, WorkQueue


def schedule() -> WorkQueue[str]:
    return WorkQueue(random.Random(1))


def test_key_added_repeatedly_is_taken_once():
    queue = schedule()
    for _ in range(5):
        queue.add("a", 0)
    queue.add("b", 0)
    assert [queue.take(0), queue.take(0), queue.take(0)] == ["a", "b", None]


def test_key_added_while_in_work_is_taken_again_afterwards():
    queue = schedule()
    queue.add("a", 0)
    assert queue.take(0) == "a"
    queue.add("a", 0)
    assert queue.take(0) is None
    queue.done("a", 1)
    assert queue.take(1) == "a"


def test_earlier_of_two_times_counts():
    queue = schedule()
    queue.add("a", 0, 100)
    queue.add("a", 0, 10)
    queue.add("a", 0, 50)
    assert queue.wait_s(0) == 10
    assert queue.take(9.9) is None
    assert queue.take(10) == "a"
    assert queue.wait_s(10) is None


def test_failing_key_waits_longer_each_time_up_to_a_bound():
    queue = schedule()
    now, waits = 0.0, []
    queue.add("a", now)
    for _ in range(20):
        now += queue.wait_s(now) or 0
        assert queue.take(now) == "a"
        waits.append(queue.failed("a", now))
    assert waits[0] < 1
    assert all(b > a for a, b in itertools.pairwise(waits[:7]))
    assert max(waits) <= 1.25 * BACKOFF.last_s
    now += queue.wait_s(now) or 0
    queue.take(now)
    queue.done("a", now)
    queue.add("a", now)
    queue.take(now)
    assert queue.failed("a", now) < 1, "a success starts anew"


def test_event_shortens_a_long_wait_without_causing_a_storm():
    queue = schedule()
    queue.add("a", 0)
    for _ in range(12):
        queue.take(10_000)
        queue.failed("a", 0)
        queue.add("a", 0, 10_000)
    queue.add("a", 0)
    assert queue.wait_s(0) == EVENT_WAIT_S


def test_servers_retry_after_is_respected():
    queue = schedule()
    queue.add("a", 0)
    queue.take(0)
    assert queue.failed("a", 0, at_least_s=30) == 30
    queue.add("a", 0)
    assert queue.wait_s(0) == 30


def test_forgotten_key_is_not_taken():
    queue = schedule()
    queue.add("a", 0)
    queue.forget("a")
    assert (queue.take(100), queue.wait_s(0), len(queue)) == (None, None, 0)


def test_users_changes_that_are_due_precede_older_entries():
    queue = schedule()
    for key in "abc":
        queue.add(key, 0)
    queue.add("d", 1, first=True)
    queue.add("e", 1, 5, first=True)
    queue.add("c", 1, first=True)
    assert [queue.take(1) for _ in range(5)] == ["d", "c", "a", "b", None]
    assert queue.take(6) == "e"


def test_users_changes_do_not_starve_other_keys():
    queue = WorkQueue[str](most_first=3)
    queue.add("pod", 0)
    for number in range(5):
        queue.add(f"user {number}", 1, first=True)
    assert [queue.take(2) for _ in range(4)] == ["user 0", "user 1", "user 2", "pod"]


def test_concurrent_follow_up_work_is_limited_so_users_find_a_worker():
    queue = schedule()
    for number in range(FOLLOWING + 2):
        queue.add(f"pod {number}", number / 100)
    taken = [queue.take(1) for _ in range(FOLLOWING + 1)]
    assert taken == [*(f"pod {number}" for number in range(FOLLOWING)), None]
    assert queue.wait_s(1) is None, "until something is added or done"
    queue.add("user", 1, 0.5, first=True)
    assert queue.wait_s(1) == 0.5
    assert (queue.take(1), queue.take(1.5)) == (None, "user")
    queue.done("user", 2)
    assert queue.take(2) is None
    queue.done("pod 3", 2)
    assert [queue.take(2), queue.take(2)] == [f"pod {FOLLOWING}", None]


def test_users_change_during_work_goes_first_afterwards():
    queue = schedule()
    queue.add("a", 0)
    assert queue.take(0) == "a"
    queue.add("b", 0)
    queue.add("a", 1, first=True)
    assert queue.take(1) == "b"
    queue.add("c", 1)
    queue.done("a", 2)
    assert [queue.take(2), queue.take(2)] == ["a", "c"]


class Workers(RuleBasedStateMachine):
    """Any events, any ends of work: no change is lost, and no key is in work twice at a time."""

    keys = st.sampled_from("abc")

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.now = WorkQueue[str](random.Random(0), most_first=1, most_following=1), 0.0
        self.busy: set[str] = set()
        self.unseen: set[str] = set()

    @rule(key=keys, first=st.booleans())
    def event(self, key: str, first: bool) -> None:
        self.unseen.add(key)
        self.queue.add(key, self.now, first=first)

    @rule(seconds=st.floats(min_value=0, max_value=100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        key = self.queue.take(self.now)
        if key is not None:
            assert key not in self.busy
            self.busy.add(key)
            self.unseen.discard(key)

    @precondition(lambda self: self.busy)
    @rule(data=st.data(), again=st.none() | st.floats(min_value=0, max_value=50))
    def done(self, data: st.DataObject, again: float | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.busy)))
        self.busy.discard(key)
        self.queue.done(key, self.now, again)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.busy)))
        self.busy.discard(key)
        self.unseen.add(key)
        assert self.queue.failed(key, self.now) <= 1.25 * BACKOFF.last_s

    @invariant()
    def what_is_unseen_comes_up(self) -> None:
        if self.unseen and not self.busy:
            wait = self.queue.wait_s(self.now)
            assert wait is not None
            assert wait <= 1.25 * BACKOFF.last_s

    def teardown(self) -> None:
        for key in sorted(self.busy):
            self.queue.done(key, self.now)
        found = set()
        for _ in range(20):
            self.now += self.queue.wait_s(self.now) or 0
            if (key := self.queue.take(self.now)) is not None:
                found.add(key)
                self.queue.done(key, self.now)
        assert self.unseen <= found


TestWorkers = Workers.TestCase
TestWorkers.settings = profile(max_examples=100, stateful_step_count=30, deadline=None)
