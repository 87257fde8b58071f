"""The rolling digest of a loader: every batch counts, at its place, and a resumed run goes on with it."""

from __future__ import annotations

import json
import pickle

from hypothesis import assume, given
from hypothesis import strategies as st

from dataloaderjob.core.consumption import MASK, Consumption, error_mark, fold

U64 = st.integers(0, MASK)
epochs = st.lists(st.lists(U64, min_size=1, max_size=6), max_size=4)


def take(consumption: Consumption, batches: list[int]) -> None:
    for digest in batches:
        consumption.rolling = fold(consumption.rolling, digest)


def run(given_: list[list[int]]) -> Consumption:
    consumption = Consumption()
    for batches in given_:
        consumption.begin()
        take(consumption, batches)
    return consumption


@given(st.lists(U64, max_size=8), st.data())
def test_swapping_two_batches_changes_the_digest(batches: list[int], data: st.DataObject) -> None:
    assume(len(set(batches)) > 1)
    a = data.draw(st.integers(0, len(batches) - 1))
    b = data.draw(st.sampled_from([i for i, digest in enumerate(batches) if digest != batches[a]]))
    other = batches.copy()
    other[a], other[b] = other[b], other[a]
    # Two whose lower 60 bits are equal change places unseen at some distances: one pair in 2**60.
    assume((batches[a] - batches[b]) % (1 << 60))
    assert run([batches]).total != run([other]).total


@given(st.lists(U64, min_size=1, max_size=8), U64, st.data())
def test_replacing_one_batch_changes_the_digest(batches: list[int], digest: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(batches) - 1))
    assume(digest != batches[at])
    other = [*batches[:at], digest, *batches[at + 1 :]]
    assert run([batches]).total != run([other]).total


@given(epochs, st.data())
def test_run_resumed_at_any_batch_ends_with_the_same_digest(
    given_: list[list[int]], data: st.DataObject
) -> None:
    assume(given_)
    last = data.draw(st.integers(0, len(given_) - 1))
    at = data.draw(st.integers(1, len(given_[last])))
    first = run([*given_[:last], given_[last][:at]])
    second = Consumption()
    second.restore(json.loads(json.dumps(first.state())), goes_on=at < len(given_[last]))
    if at < len(given_[last]):
        second.begin()
        take(second, given_[last][at:])
    for batches in given_[last + 1 :]:
        second.begin()
        take(second, batches)
    assert second.state() == run(given_).state()


def test_epoch_without_batches_taken_leaves_no_trace() -> None:
    one, other = run([[1, 2], [3]]), run([[1, 2]])
    other.begin()
    other.begin()
    take(other, [3])
    assert one.state() == other.state()
    assert other.epoch == 1


def test_digest_depends_on_the_ends_of_epochs() -> None:
    assert run([[1, 2], [3]]).total != run([[1], [2, 3]]).total != run([[1, 2, 3]]).total


@given(epochs)
def test_reported_differences_add_up_to_the_total(given_: list[list[int]]) -> None:
    """As the trainer's word of the metrics is kept: by differences, for the sum over all loaders."""
    word, consumption = 0, Consumption()
    consumption.restore([4, 5, 6], goes_on=False)
    for batches in given_:
        word += consumption.begin()
        for digest in batches:
            before = consumption.rolling
            take(consumption, [digest])
            word += consumption.rolling - before
    assert not given_ or word & MASK == consumption.total


def test_an_error_counts_by_its_type() -> None:
    assert error_mark(ValueError("a")) == error_mark(ValueError("b")) != error_mark(KeyError("a"))


def test_consumption_can_be_pickled() -> None:
    first = run([[1, 2]])
    assert pickle.loads(pickle.dumps(first)).state() == first.state()
