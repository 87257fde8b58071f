"""Slots of an IterableDataset: their order, what a resumed epoch asks for, and one slot that is made again."""

import base64
import hashlib
import json
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stream_data import (
    BadState,
    Counting,
    Failing,
    LargeState,
    Shards,
    WithOwnState,
    WithState,
    stopping_collate,
)

from dataloaderjob.batches.digest import digest_update
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core import ticket_codec
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import InputError, RemoteProtocolError
from dataloaderjob.core.snapshots import DATA, MAX_SNAPSHOTS, PICKLE
from dataloaderjob.core.ticket_codec import SlotTicket
from dataloaderjob.feeder.answers import Answer, Answers, SnapshotClock
from dataloaderjob.feeder.channel import MessageKind
from dataloaderjob.making.fetcher import SampleError, preserved_generators, seed_worker
from dataloaderjob.making.slot_source import SlotEnded, SlotSource
from dataloaderjob.sidecar.dispatch.homes import Slot
from dataloaderjob.trainer.epochs.plans import Places, counts_before
from dataloaderjob.trainer.session.slot_places import Saved, SlotPlace

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def in_turn(lengths: list[int]) -> list[tuple[int, int]]:
    """torch's order: (number, slot) of each batch."""
    return sorted((number, slot) for slot, length in enumerate(lengths) for number in range(length))


def walk(lengths: list[int], places: Places, window: int, ahead: int = 0) -> list[tuple[int, int]]:
    """What is given where each slot answers in order, and answers come once `ahead` more were asked for."""
    given_, asked = [], []
    while True:
        while (found := places.next(window + ahead)) is not None:
            asked.append(found[0])
        if not asked:
            return given_
        place = asked.pop(0)
        if place.number >= lengths[place.slot]:
            places.ended(place, lengths[place.slot])
        elif places.there(place):
            places.stands(places.took(place, None))
            given_.append((place.number, place.slot))


@given(lengths, st.integers(1, 12))
def test_order_equals_torchs_however_late_the_ends_are_known(lengths, window):
    assert walk(lengths, Places(len(lengths)), window) == in_turn(lengths)


@given(lengths, st.integers(1, 12), st.integers(0, 60))
def test_epoch_resumes_after_any_number_of_batches(lengths, window, first):
    """No length is known where it begins: one state is right for all ranks."""
    assert walk(lengths, Places(len(lengths), first), window) == in_turn(lengths)[first:]


@given(lengths, st.integers(0, 60))
def test_batches_are_counted_by_slot_without_iterating(lengths, first):
    order = in_turn(lengths)[:first]
    expected = [sum(slot == s for _, slot in order) for s in range(len(lengths))]
    assert counts_before(first, len(lengths), dict(enumerate(lengths))) == expected


def test_ten_billion_batches_are_counted_at_once():
    assert counts_before(10**10, 4, {2: 10**6}) == [3_333_000_000, 3_333_000_000, 10**6, 3_333_000_000]


@given(st.builds(
    SlotTicket, base_seed=st.integers(0, 2**64 - 1), number=st.integers(0, 2**63), slot=st.integers(0, 2**32 - 1),
    size=st.integers(0, 2**32 - 1), bare=st.booleans(), drop_last=st.booleans(), needed=st.integers(0, 2**64 - 1),
    known=st.none() | st.tuples(st.integers(0, 2**64 - 2), st.integers(0, 2**64 - 1)),
    snapshot=st.none() | st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=50)),
))  # fmt: skip
def test_slot_ticket_round_trips(ticket):
    packed = ticket_codec.pack_slot_ticket(ticket)
    assert ticket_codec.unpack_slot_ticket(packed) == ticket
    assert ticket_codec.slot_of(packed) == ticket.slot
    assert ticket_codec.describe_keys(packed, 2) == f"sample 2 of batch {ticket.number} of slot {ticket.slot}"


@given(
    start=st.none() | st.tuples(st.integers(0, 9), st.binary(max_size=9)),
    later=st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=50)),
    known=st.none() | st.tuples(st.integers(0, 2**64 - 2), st.integers(0, 2**64 - 1)),
)
def test_later_beginning_replaces_that_of_a_slot_ticket(start, later, known):
    ticket = SlotTicket(1, 2, 3, 4, snapshot=start)
    packed = ticket_codec.with_beginning(ticket_codec.pack_slot_ticket(ticket), later, known)
    assert packed == ticket_codec.pack_slot_ticket(ticket._replace(snapshot=later, known=known))


def test_ticket_with_keys_belongs_to_no_slot():
    packed = ticket_codec.pack_ticket(1, 0, [1, 2])
    assert ticket_codec.slot_of(packed) is None
    assert ticket_codec.unpack_slot_ticket(packed) is None


def test_truncated_slot_ticket_is_refused():
    packed = ticket_codec.pack_slot_ticket(SlotTicket(1, 2, 3, 4))
    assert ticket_codec.slot_of(packed[:-1]) is None
    with pytest.raises(RemoteProtocolError, match="a slot's ticket must have"):
        ticket_codec.unpack_slot_ticket(packed[:-1])
    with pytest.raises(RemoteProtocolError, match="key form 2"):
        ticket_codec.unpack_ticket(packed)


def test_manifest_of_a_map_style_bundle_has_no_slot_fields():
    bundle = Bundle(blobs=(("0" * 64, 3),))
    assert b"slot" not in bundle.manifest()
    assert b"env" not in bundle.manifest()


def test_slots_and_ranks_are_separate_sessions_of_one_code():
    of = [
        Bundle(blobs=(("0" * 64, 3),), workers=2, slot=slot, env={"RANK": rank})
        for slot in (0, 1) for rank in "01"
    ]  # fmt: skip
    assert len({bundle.id for bundle in of}) == 4
    assert len({bundle.code for bundle in of}) == 1
    assert all(Bundle.parse(bundle.manifest()) == bundle for bundle in of)


# One slot, made again


def made(source: SlotSource, numbers: range, **more) -> list[str]:
    """A word for each batch: its digest, the type of its error, or "end"."""
    said = []
    for number in numbers:
        hasher = hashlib.sha256()
        try:
            digest_update(hasher, source.make(SlotTicket(7, number, 0, 4, **more)))
            said.append(hasher.hexdigest())
        except SampleError as exc:
            said.append(type(exc.cause).__name__)
        except SlotEnded:
            said.append(f"end {source.made}")
    return said


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "more"),
    [
        (Shards(), None, {}),
        (Shards(), None, {"drop_last": True}),
        (Shards(), None, {"bare": True}),
        (Failing(), None, {}),
        (Counting(), None, {}),
        (Shards(), stopping_collate, {}),
        (Shards(()), None, {}),
    ],
)
def test_restarted_slot_makes_the_same_batches_from_any_point_on(dataset, collate_fn, more):
    def begun() -> SlotSource:
        seed_worker(11, 0)
        return SlotSource(dataset, collate_fn)

    with preserved_generators():
        whole = made(begun(), range(60), **more)
        assert whole[-1].startswith("end")
        for first in range(0, 60, 7):
            assert made(begun(), range(first, 60), **more) == whole[first:]


def test_error_of_iter_is_reported_once_and_ends_the_slot():
    class Broken(torch.utils.data.IterableDataset):
        def __iter__(self):
            raise FileNotFoundError("no such shard")

    assert made(SlotSource(Broken(), None), range(3)) == ["FileNotFoundError", "end 1", "end 1"]


def test_stop_iteration_of_collate_or_iter_is_an_error_of_its_batch():
    """Under torch's loader it ends the worker, as if its data were over."""

    class Broken(torch.utils.data.IterableDataset):
        def __iter__(self):
            raise StopIteration

    def stopped(samples: list[int]) -> list[int]:
        if 4 in samples:
            raise StopIteration
        return samples

    assert made(SlotSource(Broken(), None), range(2)) == ["RuntimeError", "end 1"]
    first, second, third, *rest = made(SlotSource(range(12), stopped), range(5))
    assert (second, rest) == ("RuntimeError", ["end 3", "end 3"])
    whole = made(SlotSource(range(12), list), range(3))
    assert [first, third] == whole[::2]


# Answers that are kept


def test_buffer_is_free_once_sent_and_no_longer_needed():
    freed: list[int] = []
    answers = Answers(freed.append)
    for number in range(3):
        answer = Answer(kind=MessageKind.BUILT, payload=b"", buffer=10 + number)
        answers.keep(number, answer)
        answers.lend(answer)
    answers.returned(10)
    assert freed == []  # it may be asked for again
    answers.forget(1)
    assert freed == [10]
    answers.forget(2)
    assert freed == [10]  # on its way
    answers.returned(11)
    assert freed == [10, 11]
    again = answers.get(2)
    answers.lend(again)
    answers.forget(3)
    answers.returned(12)
    assert freed == [10, 11]  # it was sent twice
    answers.returned(12)
    assert freed == [10, 11, 12]


# Snapshots


class Touch:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class Reader:
    def __setstate__(self, state):
        pass


class OddState(WithOwnState):
    def state_dict(self):
        return {**super().state_dict(), "reader": Reader()}


class DrawsAtIter(WithState):
    """Draws before the first sample is asked for."""

    def __iter__(self):
        random.random()
        torch.rand(3)
        return super().__iter__()


@pytest.mark.parametrize("dataset", [WithState(60), WithOwnState(60), DrawsAtIter(60)])
def test_slot_resumes_from_each_of_its_snapshots(dataset):
    with preserved_generators():
        seed_worker(11, 0)
        source = SlotSource(dataset, None)
        whole, snapshots = [], []
        for number in range(15):
            whole += made(source, range(number, number + 1))
            snapshots.append(source.snapshot())
        for at, snapshot in enumerate(snapshots):
            restored = SlotSource(type(dataset)(60), None)
            restored.restore(snapshot, at + 1)
            assert made(restored, range(at + 1, 15)) == whole[at + 1 :]


def test_slot_that_has_made_batches_does_not_jump():
    source = SlotSource(WithOwnState(60), None)
    made(source, range(3))
    later = SlotSource(WithOwnState(60), None)
    made(later, range(9))
    ticket = SlotTicket(7, 3, 0, 4, snapshot=(2, later.snapshot()))
    assert source.make(ticket)["id"].tolist() == [12, 13, 14, 15]


def test_snapshot_later_than_the_batch_is_not_used():
    later = SlotSource(WithOwnState(60), None)
    made(later, range(9))
    fresh = SlotSource(WithOwnState(60), None)
    assert fresh.make(SlotTicket(7, 3, 0, 4, snapshot=(9, later.snapshot())))["id"].tolist() == [
        12,
        13,
        14,
        15,
    ]


def test_datasets_without_a_state_have_no_snapshot():
    source = SlotSource(Shards(), None)
    made(source, range(3))
    assert source.snapshot() is None


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_snapshots_take_at_most_a_fiftieth_of_a_slots_time():
    clock = Clock()
    source = SlotSource(WithOwnState(2000), None)
    made(source, range(1))
    original = source.snapshot

    def slow() -> bytes | None:
        clock.now += 0.1
        return original()

    source.snapshot = slow
    snapshots, taken = SnapshotClock(clock), []
    while clock.now < 100:
        if snapshots.take(source) is not None:
            taken.append(clock.now)
        clock.now += 0.01
    assert 18 <= len(taken) <= 20


@pytest.mark.parametrize(
    ("dataset", "why"),
    [(LargeState(), b"but at most 1 MiB are kept"), (BadState(), b"no state today")],
)
def test_state_that_cannot_be_kept_is_reported_once(dataset, why):
    snapshots, source = SnapshotClock(Clock()), SlotSource(dataset, None)
    made(source, range(2))
    assert why in snapshots.take(source)
    assert snapshots.stopped
    assert snapshots.take(source) is None


def test_latest_of_the_unneeded_snapshots_is_kept():
    slot = Slot(0, b"", b"", needed=7)
    assert [slot.remember(number, b"state") for number in (3, 1, 6, 9, 6)] == [True, True, True, True, False]
    assert [slot.snapshot(number) is None for number in (5, 6)] == [True, False]
    assert len(slot.snapshots) == 2
    assert slot.snapshot(8) == (6, b"state")
    assert slot.snapshot(9) == (9, b"state")
    assert slot.snapshot(5) is None


def test_flood_of_snapshots_is_bounded_and_keeps_the_needed_one():
    slot, places = Slot(0, b"", b"", needed=5), Places(2)
    for _ in range(60):
        places.next(60)
    for number in range(1000):
        slot.remember(number, b"state")
        places.keep(0, number, b"state")
        places.keep(0, number, b"another")
        places.keep(7, number, b"of no slot")
    assert len(slot.snapshots) == MAX_SNAPSHOTS
    assert slot.snapshot(5) == (5, b"state")
    assert [len(own) for own in places._snapshots] == [MAX_SNAPSHOTS, 0]
    latest = places.beginning(0, 1000)
    assert latest is not None
    assert latest[0] <= 30, "no later than what was asked for"


def test_slot_knows_the_digest_of_the_previous_batch():
    slot = Slot(0, b"", b"")
    for number in range(10):
        slot.needed = max(0, number - 2)
        slot.received(number, 100 + number)
    assert slot.known(9) == (8, 108)
    assert slot.known(2) is None
    assert len(slot.digests) == 4


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 2**64 - 1), st.binary(max_size=40)), min_size=1, max_size=6
    )
)
def test_slot_part_of_a_state_round_trips(found):
    places = Places(len(found))
    for _ in range(3 * len(found)):
        place, _ = places.next(1)
        places.there(place)
        places.stands(places.took(place, found[place.slot][1]))
    for slot, (has_state, _, state) in enumerate(found):
        if has_state:
            places.keep(slot, 2, state)
    saved = json.loads(json.dumps(places.pack(rank=3)))
    trusted = Saved.of(saved, 3, allow_pickle=True)
    assert trusted.snapshots == {slot: (2, state) for slot, (has, _, state) in enumerate(found) if has}
    assert trusted.digests == {SlotPlace(slot, 2, True): one[1] for slot, one in enumerate(found)}
    assert Saved.of(saved, 2) == Saved()  # another rank's slots


def test_json_checkpoint_runs_no_code(tmp_path: Path):
    marker = tmp_path / "ran"
    evil = pickle.dumps(Touch(marker))
    state = {**Places(1).pack(0), "slots": [[1, base64.b64encode(evil).decode()]]}
    with pytest.raises(InputError, match=r"a pickle of slot 0, which runs code .* allow_pickle=True"):
        Saved.of(state, 0)
    assert Saved.of(state, 0, allow_pickle=True).snapshots == {0: (1, evil)}
    for forged in (evil, b"D" + evil, b"X" + evil, b"", b"D"):
        with pytest.raises(RemoteProtocolError):
            SlotSource(WithOwnState(60), None).restore(forged, 1)
    assert not marker.exists()
    with pytest.raises(RemoteProtocolError):
        SlotSource(WithOwnState(60), None, allow_pickle=True).restore(evil, 1)
    assert marker.exists(), "the pickle would have run code"


def generator_states(**changed: Any) -> tuple[Any, ...]:
    """States of the three generators, with one of them changed."""
    honest = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return tuple({**honest, **changed}.values())


def numpys(**changed: Any) -> Any:
    """A state of numpy's generator in its form as a dict."""
    state: Any = np.random.RandomState(1).get_state(legacy=False)
    return {**state, **changed}


WORDS = np.zeros(624, np.uint32)
FORGED: dict[str, Any] = {
    "position-1000": {"numpy": ("MT19937", WORDS, 1000, 0, 0.0)},
    "position-10**8": {"numpy": ("MT19937", WORDS, 10**8, 0, 0.0)},
    "position-below-0": {"numpy": ("MT19937", WORDS, -1, 0, 0.0)},
    "short-words": {"numpy": ("MT19937", WORDS[:9], 1, 0, 0.0)},
    "words-of-8-bytes": {"numpy": ("MT19937", WORDS.astype(np.uint64), 1, 0, 0.0)},
    "three-parts": {"numpy": ("MT19937", WORDS, 1000)},
    "list": {"numpy": ["MT19937", WORDS, 1000, 0, 0.0]},
    "dict": {"numpy": numpys(state={"key": WORDS, "pos": 1000})},
    "dict-of-philox": {"numpy": {**np.random.Philox(1).state, "buffer_pos": 99}},
    "odd": {"numpy": 7},
    "torch-624-of-624": {
        "torch": torch.tensor(list(struct.pack("<QiiQ", 1, 624, 1, 624) + bytes(5032)), dtype=torch.uint8)
    },
    "torch-short": {"torch": torch.zeros(7, dtype=torch.uint8)},
    "torch-of-floats": {"torch": torch.zeros(5056)},
    "torch-odd": {"torch": None},
    "gauss": {"python": (*random.getstate()[:2], "x")},
    "python-odd": {"python": 7},
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED)
def test_snapshot_with_a_generator_beyond_its_words_is_refused(forged: str):
    state = False, {"at": 1}, generator_states(**FORGED[forged]), 1
    data = DATA + b"".join(map(bytes, encode(state, allow_pickle=False).buffers))
    with (
        preserved_generators(),
        pytest.raises(RemoteProtocolError, match="the state of a slot cannot be resumed"),
    ):
        SlotSource(WithOwnState(60), None).restore(data, 1)


@pytest.mark.parametrize("counted", [0, 2, -1, 2**60, True, 1.0, None], ids=repr)
def test_snapshot_with_another_number_of_batches_is_refused(counted: Any):
    state = False, {"at": 1}, generator_states(), counted
    data = DATA + b"".join(map(bytes, encode(state, allow_pickle=False).buffers))
    with pytest.raises(RemoteProtocolError, match="expected the state after 1 batches"):
        SlotSource(WithOwnState(60), None).restore(data, 1)


@pytest.mark.parametrize("allowed", [False, True])
def test_snapshot_is_pickled_only_if_allowed(allowed: bool):
    source = SlotSource(WithOwnState(60), None, allow_pickle=allowed)
    made(source, range(1))
    assert source.snapshot()[:1] == (PICKLE if allowed else DATA)


def test_state_that_needs_pickle_is_named():
    source = SlotSource(OddState(60), None)
    made(source, range(1))
    why = SnapshotClock(Clock()).take(source).decode()
    assert why == f"state_dict()['reader']: {__name__}.Reader, which can be kept only with allow_pickle=True"
    source.allow_pickle = True
    assert SnapshotClock(Clock()).take(source)[:1] == PICKLE


def test_a_damaged_snapshot_is_refused():
    with pytest.raises(InputError, match="cannot be read"):
        Saved.of({**Places(1).pack(0), "slots": [[1, "%%%"]]}, 0)


def test_a_damaged_digest_is_refused():
    with pytest.raises(InputError, match="cannot be read"):
        Saved.of({**Places(1).pack(0), "digests": [[1, "what"]]}, 0)


def test_snapshots_in_a_state_precede_the_next_batch():
    places = Places(2)
    for _ in range(20):
        places.next(20)
    for number in range(10):
        place = SlotPlace(number % 2, number // 2)
        places.there(place, number)
        places.stands(places.took(place, number))
    for number in (2, 4, 5, 7):
        places.keep(0, number, b"state")
    assert places.taken == [5, 5]
    assert places.snapshots() == [(4, b"state"), None]


def test_loaded_state_is_returned_unchanged_before_the_first_batch():
    places = Places(2, 10, {0: (4, b"state")})
    assert places.snapshots() == [(4, b"state"), None]


def test_replayed_batches_are_reported_by_number():
    seen = []
    source = SlotSource(WithOwnState(60), None)
    source.make(
        SlotTicket(7, 4, 0, 4), None, lambda number, batch: seen.append((number, batch["id"].tolist()))
    )
    assert seen == [(n, list(range(4 * n, 4 * n + 4))) for n in range(4)]
