"""Times of batches: what a builder writes is read back, also while it writes, and adds up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import ticket_codec, timings
from dataloaderjob.core.costs import QueuedTime
from dataloaderjob.core.timings import Entry, Sums, Times
from dataloaderjob.feeder import timing

KEYS = [7, 8, 9]


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**9
        monkeypatch.setattr(timing, "_perf", lambda: self.ns)

    def pass_(self, ms: float) -> None:
        self.ns += round(ms * 1e6)


def ticket(keys: list[object] = KEYS) -> bytes:  # type: ignore[assignment]
    return ticket_codec.pack_ticket(1, 0, keys)


def read(folder: Path) -> Times:
    times = timings.read(timings.path_of(folder, "feeder-0", os.getpid()))
    assert times is not None
    return times


def make(made: timing.NoClock, clock: Clock, number: int, *ms: float, keys: list[object] = KEYS) -> None:  # type: ignore[assignment]
    """A batch whose samples take these times, and its collate_fn and its encoding 1 ms each."""
    made.begin()
    made.keys = keys
    sample = made.watching(lambda _: None)
    for position, took in enumerate(ms):
        sample(position)
        clock.pass_(took)
    made.fetched()
    clock.pass_(1)
    made.made()
    clock.pass_(1)
    made.end(number, ticket(keys), 1000)


def test_slowest_sample_of_a_batch_is_named_by_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    made = timing.open_clock(tmp_path, "feeder-0", QueuedTime(), by_sample=True)
    make(made, clock, 3, 5, 40, 6)
    make(made, clock, 4, 5, 5, 90)
    times = read(tmp_path)
    assert [(e.took_ns / 1e6, e.ticket, e.text) for e in times.batches] == [
        (102, 4, "index 9"),
        (53, 3, "index 8"),
    ]
    assert [(e.took_ns / 1e6, e.text) for e in times.samples] == [(90, "index 9"), (40, "index 8")]
    sums = times.sums
    assert (sums.count, sums.nbytes, sums.samples, sums.wall_ns / 1e6) == (2, 2000, 6, 155)
    assert (sums.fetch_ns / 1e6, sums.collate_ns / 1e6, sums.encode_ns / 1e6) == (151, 2, 2)


def test_only_the_slowest_batches_are_kept_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    made = timing.open_clock(tmp_path, "feeder-0", QueuedTime(), by_sample=True)
    for number in range(60):
        make(made, clock, number, 1 + (number * 37) % 60)
    kept = [round(entry.took_ns / 1e6) for entry in read(tmp_path).batches]
    assert kept == [62 - i for i in range(timings.SLOWEST)]


def test_keys_are_named_without_calling_code_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("called")

    clock = Clock(monkeypatch)
    made = timing.open_clock(tmp_path, "feeder-0", QueuedTime(), by_sample=True)
    for number, key in enumerate(("<script>", ("a", 3), "ü" * 500)):
        make(made, clock, number, 5 - number, keys=[key])
    made.begin()
    made.keys = [Loud()]
    made.watching(lambda _: None)(0)
    clock.pass_(9)
    made.fetched()
    made.end(9, ticket(["x"]), 5)
    texts = [entry.text for entry in read(tmp_path).batches]
    assert texts[:3] == ["key number 0 of 1", "key '<script>'", "key ('a', 3)"]
    assert texts[3].startswith("key 'üü")
    assert len(texts[3]) <= 60


def test_failed_batches_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    made = timing.open_clock(tmp_path, "feeder-0", QueuedTime(), by_sample=True)
    made.begin()
    clock.pass_(5)
    made.end(0, ticket(), None)
    times = read(tmp_path)
    assert (times.sums.count, times.sums.failed, times.batches) == (0, 1, [])


def test_samples_made_together_are_not_timed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock(monkeypatch)
    make(timing.open_clock(tmp_path, "feeder-0", QueuedTime(), by_sample=False), clock, 0, 5, 5)
    times = read(tmp_path)
    assert times.sums.count == 1
    assert times.samples == []


@pytest.mark.parametrize("kind", ["none", "missing", "a file", "taken"])
def test_without_a_folder_nothing_is_measured(tmp_path: Path, kind: str):
    folder: Path | None = tmp_path / "times"
    if kind == "none":
        folder = None
    elif kind == "a file":
        (tmp_path / "times").touch()
    elif kind == "taken":
        (tmp_path / "times").mkdir()
        timings.path_of(tmp_path / "times", "feeder-0", os.getpid()).touch()
    made = timing.open_clock(folder, "feeder-0", QueuedTime(), by_sample=True)
    assert type(made) is timing.NoClock
    made.begin()
    made.end(0, b"", 1)


def test_the_oldest_files_make_room_for_those_of_new_builders(tmp_path: Path):
    for pid in range(1, timings.MOST_FILES + 10):
        path = timings.path_of(tmp_path, "feeder-0", pid)
        path.touch()
        os.utime(path, (pid, pid))
    timing.open_clock(tmp_path, "feeder-0", QueuedTime(), by_sample=True)
    left = {pid for _, pid, _ in timings.files(tmp_path)}
    assert len(left) == timings.MOST_FILES
    assert min(left) > 10
    assert os.getpid() in left


@pytest.mark.parametrize("data", [b"", b"x" * 10, b"x" * timings.NBYTES], ids=["empty", "short", "other"])
def test_files_that_are_not_of_builders_are_ignored(tmp_path: Path, data: bytes):
    path = tmp_path / "feeder-0.1.times"
    path.write_bytes(data)
    assert timings.read(path) is None
    (tmp_path / "other.txt").touch()
    assert [(feeder, pid) for feeder, pid, _ in timings.files(tmp_path)] == [("feeder-0", 1)]


entries = st.builds(
    Entry, took_ns=st.integers(1, 10**12), at_ns=st.just(0), ticket=st.integers(0, 9), sample_ns=st.just(0),
    slot=st.just(-1), text=st.just(""),
)  # fmt: skip
times_of_one = st.builds(
    lambda n, wall, slow: Times(Sums(count=n, wall_ns=wall), [n] * timings.BUCKETS, timings.slowest(slow)),
    st.integers(0, 99), st.integers(0, 10**9), st.lists(entries, max_size=40),
)  # fmt: skip


@given(st.lists(times_of_one, max_size=5))
def test_sums_of_many_builders_do_not_depend_on_their_order(found: list[Times]):
    one, other = Times(), Times()
    for times in found:
        one.add(times)
    for times in reversed(found):
        other.add(times)
    assert (one.sums, one.buckets) == (other.sums, other.buckets)
    assert [entry.took_ns for entry in one.batches] == [entry.took_ns for entry in other.batches]


def test_quantiles_are_right_to_about_a_tenth():
    times = Times()
    for ms in range(1, 1001):
        times.buckets[timings.bucket_of(ms * 10**6)] += 1
    for share in (0.1, 0.5, 0.99):
        found = times.quantile(share)
        assert found is not None
        assert found == pytest.approx(share, rel=0.12)
    assert Times().quantile(0.5) is None


def test_longest_of_a_window_is_the_mean_of_its_maxima():
    times = Times()
    times.buckets[bucket(10)] = 95
    times.buckets[bucket(100)] = 5
    some = 1 - 0.95**16
    assert times.longest_of(16) == pytest.approx(0.1 * some + 0.01 * (1 - some), rel=0.1)
    assert times.longest_of(1) == pytest.approx(0.95 * 0.01 + 0.05 * 0.1, rel=0.1)
    assert Times().longest_of(16) == 0.0


def bucket(ms: float) -> int:
    return timings.bucket_of(round(ms * 1e6))


@pytest.mark.parametrize("words", [b"1 99999999999999999999 3", b"1 -5 3", b"text", b""])
def test_descriptor_that_user_code_reuses_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: bytes
):
    clock = Clock(monkeypatch)
    made = timing.open_clock(tmp_path, "feeder-0", QueuedTime(), by_sample=True)
    assert isinstance(made, timing.BatchClock)
    assert made._queued_time.fd is not None
    make(made, clock, 0, 5)
    (tmp_path / "other").write_bytes(words)
    other = os.open(tmp_path / "other", os.O_RDONLY)
    os.dup2(other, made._queued_time.fd)
    os.close(other)
    make(made, clock, 1, 5)
    make(made, clock, 2, 5)
    sums = read(tmp_path).sums
    assert sums.count == 3
    assert 0 <= sums.queued_ns <= sums.wall_ns
