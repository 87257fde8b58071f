"""Slots of an IterableDataset: their order, what a resumed epoch asks for, and one slot that is made again."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stream_data import Counting, Failing, Shards, ending_collate

from dataloaderjob.codec.digest import digest_update
from dataloaderjob.codec.fetcher import SampleError, preserved_generators, seed_worker
from dataloaderjob.codec.slots import SlotEnded, SlotSource
from dataloaderjob.core import frames
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import SlotTicket
from dataloaderjob.feeder.channel import Kind
from dataloaderjob.feeder.slots import Answer, Answers
from dataloaderjob.trainer.slots import Places, counts_before

lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def in_turn(lengths: list[int]) -> list[tuple[int, int]]:
    """torch's order: (number, slot) of each batch."""
    return sorted((number, slot) for slot, length in enumerate(lengths) for number in range(length))


def walk(lengths: list[int], places: Places, window: int, ahead: int = 0) -> list[tuple[int, int]]:
    """What is given where each slot answers in order, and answers come once `ahead` more were asked for."""
    given_, asked = [], []
    while True:
        while len(asked) < window + ahead and (place := places.next()) is not None:
            asked.append(place)
        if not asked:
            return given_
        place = asked.pop(0)
        if place.number >= lengths[place.slot]:
            places.ended(place, lengths[place.slot])
        else:
            places.took(place)
            if not place.is_probe:
                given_.append((place.number, place.slot))


@given(lengths, st.integers(1, 12))
def test_the_order_is_torchs_however_late_the_ends_are_known(lengths, window):
    assert walk(lengths, Places(len(lengths)), window) == in_turn(lengths)


@given(lengths, st.integers(1, 12), st.integers(0, 60))
def test_an_epoch_goes_on_after_any_number_of_batches(lengths, window, first):
    """No length is known where it begins: one state is right for all ranks."""
    assert walk(lengths, Places(len(lengths), first), window) == in_turn(lengths)[first:]


@given(lengths, st.integers(0, 60))
def test_batches_are_counted_by_slot_without_walking_them(lengths, first):
    order = in_turn(lengths)[:first]
    expected = [sum(slot == s for _, slot in order) for s in range(len(lengths))]
    assert counts_before(first, len(lengths), dict(enumerate(lengths))) == expected


def test_ten_billion_batches_are_counted_at_once():
    assert counts_before(10**10, 4, {2: 10**6}) == [3_333_000_000, 3_333_000_000, 10**6, 3_333_000_000]


@given(st.builds(
    SlotTicket, base_seed=st.integers(0, 2**64 - 1), number=st.integers(0, 2**63), slot=st.integers(0, 2**32 - 1),
    size=st.integers(0, 2**32 - 1), bare=st.booleans(), drop_last=st.booleans(), needed=st.integers(0, 2**64 - 1),
))  # fmt: skip
def test_a_slots_ticket_comes_out_as_it_went_in(ticket):
    packed = frames.pack_slot_ticket(ticket)
    assert frames.unpack_slot_ticket(packed) == ticket
    assert frames.slot_of(packed) == ticket.slot
    assert frames.describe_keys(packed, 2) == f"sample 2 of batch {ticket.number} of slot {ticket.slot}"


def test_a_ticket_with_keys_is_of_no_slot():
    packed = frames.pack_ticket(1, 0, [1, 2])
    assert frames.slot_of(packed) is None
    assert frames.unpack_slot_ticket(packed) is None


def test_half_a_slots_ticket_is_refused():
    packed = frames.pack_slot_ticket(SlotTicket(1, 2, 3, 4))
    assert frames.slot_of(packed[:-1]) is None
    with pytest.raises(RemoteProtocolError, match="a slot's ticket needs"):
        frames.unpack_slot_ticket(packed[:-1])
    with pytest.raises(RemoteProtocolError, match="key form 2"):
        frames.unpack_ticket(packed)


def test_the_manifest_of_a_map_style_bundle_is_that_of_the_release_before():
    bundle = Bundle(blobs=(("0" * 64, 3),))
    assert b"slot" not in bundle.manifest()
    assert b"env" not in bundle.manifest()


def test_slots_and_ranks_are_sessions_of_their_own_of_one_code():
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
        (Shards(), ending_collate, {}),
        (Shards(()), None, {}),
    ],
)
def test_a_slot_that_begins_anew_makes_the_same_from_any_batch_on(dataset, collate_fn, more):
    def begun() -> SlotSource:
        seed_worker(11, 0)
        return SlotSource(dataset, collate_fn)

    with preserved_generators():
        whole = made(begun(), range(60), **more)
        assert whole[-1].startswith("end")
        for first in range(0, 60, 7):
            assert made(begun(), range(first, 60), **more) == whole[first:]


def test_what_iter_raises_is_told_once_and_ends_the_slot():
    class Broken(torch.utils.data.IterableDataset):
        def __iter__(self):
            raise FileNotFoundError("no such shard")

    assert made(SlotSource(Broken(), None), range(3)) == ["FileNotFoundError", "end 1", "end 1"]


# Answers that are kept


def test_a_buffer_is_free_once_it_is_sent_and_no_longer_needed():
    freed: list[int] = []
    answers = Answers(freed.append)
    for number in range(3):
        answer = Answer(kind=Kind.BUILT, payload=b"", buffer=10 + number)
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
