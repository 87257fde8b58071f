"""One batch of samples that a slot has read: its ticket, its seeds, its identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from staged_data import Photo, bright, developed
from torch.utils.data import default_collate, default_convert

from dataloaderjob.batches.encoding import encode
from dataloaderjob.core import ticket_codec
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.ticket_codec import ReadSamples, SlotTicket, Ticket
from dataloaderjob.making.fetcher import SampleError, identity_in_slot, identity_of
from dataloaderjob.making.staged import COLLATE, STAGE, Staged
from dataloaderjob.making.staging import StageFetcher
from dataloaderjob.trainer.epochs.plans import Places
from dataloaderjob.trainer.session.slot_places import SlotPlace


def read(samples: Any, *, seed: int = 1, number: int = 5, slot: int = 2, bare: bool = False) -> Ticket:
    """A ticket as it comes to a feeder."""
    body = b"".join(encode(samples, allow_pickle=True).buffers)
    return ticket_codec.unpack_ticket(
        ticket_codec.pack_read_samples(seed, number, ReadSamples(slot, 4, body), bare=bare)
    )


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**63),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=99),
    st.booleans(),
)
def test_read_samples_ticket_round_trips(seed: int, number: int, slot: int, body: bytes, bare: bool):
    packed = ticket_codec.pack_read_samples(seed, number, ReadSamples(slot, 7, memoryview(body)), bare=bare)
    assert ticket_codec.unpack_ticket(packed) == Ticket(seed, number, bare, ReadSamples(slot, 7, body))
    assert ticket_codec.slot_of(packed) is None, "any feeder may have it"
    assert ticket_codec.unpack_slot_ticket(packed) is None
    assert ticket_codec.describe_keys(packed, 3) == f"sample 3 of batch {number} of slot {slot}"
    with pytest.raises(RemoteProtocolError):
        ticket_codec.unpack_ticket(packed[: ticket_codec.TICKET_HEAD_NBYTES + 3])


def test_staged_batch_has_the_identity_of_the_slots_own():
    of_slot = SlotTicket(1, 5, 2, 4)
    assert identity_of(77, read([1, 2])) == identity_in_slot(of_slot)


def test_stage_runs_on_each_sample_before_collate():
    fetcher = StageFetcher(Staged(bright, default_collate))
    samples = [{"x": torch.full((2,), float(n)), "id": n} for n in range(3)]
    positions: list[int] = []
    batch = fetcher.fetch(9, read(samples), positions.append)
    assert batch["sum"].tolist() == [0.0, 4.0, 8.0]
    assert positions == [0, 1, 2]
    assert samples[2]["x"].tolist() == [2.0, 2.0], "what was read is not changed for who makes it again"


def test_bare_sample_is_not_collated():
    photo = Photo(4, np.zeros(2, np.uint8), slice(1, 2))
    assert StageFetcher(Staged(developed, default_convert, is_bare=True)).fetch(
        0, read(photo, bare=True)
    ).tolist() == [4, 2, 1]


def test_draws_depend_only_on_seed_slot_batch_and_sample():
    fetcher = StageFetcher(Staged(lambda _: float(np.random.rand()) + torch.rand(()).item(), torch.tensor))
    torch.manual_seed(8)
    first = fetcher.fetch(0, read([0, 0])).tolist()
    torch.manual_seed(9)
    assert fetcher.fetch(31, read([0, 0])).tolist() == first, "whoever makes it, and as whichever ticket"
    others = [fetcher.fetch(0, read([0, 0], **{name: 3})).tolist() for name in ("seed", "slot", "number")]
    drawn = [value for values in (first, *others) for value in values]
    assert len(set(drawn)) == len(drawn)


def test_error_is_attributed_to_the_stage():
    def fails(sample: int) -> int:
        return 1 // sample

    with pytest.raises(SampleError) as caught:
        StageFetcher(Staged(fails, default_collate)).fetch(0, read([1, 0]))
    assert caught.value.phase == STAGE
    assert caught.value.position == 1
    assert isinstance(caught.value.cause, ZeroDivisionError)


@pytest.mark.parametrize("phase", [STAGE, COLLATE])
def test_users_stop_iteration_is_an_error_and_not_the_end(phase: str):
    def ends(_: Any) -> Any:
        return next(iter(()))

    staged = Staged(ends, list) if phase == STAGE else Staged(abs, ends)
    with pytest.raises(RuntimeError, match=f"{phase} raised StopIteration"):
        staged([1, 2])
    with pytest.raises(SampleError) as caught:
        StageFetcher(staged).fetch(0, read([1, 2]))
    assert caught.value.phase == phase


def test_read_samples_are_not_requested_again_and_state_counts_returned():
    places = Places(1)
    first, second = SlotPlace(0, 0), SlotPlace(0, 1)
    assert [places.next(3) for _ in range(4)] == [
        (first, True),
        (second, True),
        (SlotPlace(0, 2), True),
        None,
    ]
    assert places.there(first, 11)
    assert places.there(second, 12)
    marks = [places.took(first, 11), places.took(second, 12)]
    assert (places.needed(0), places.taken) == (2, [0])
    places.keep(0, 1, b"after one")
    places.keep(0, 2, b"after two")
    places.stands(marks[0])
    assert places.snapshots() == [None], "the state is to begin with what was read and not given"
    places.ended(SlotPlace(0, 2), 2)
    assert places.pack(0)["ends"] == [], "one of its batches is still to be given"
    places.stands(marks[1])
    assert places.pack(0)["ends"] == [[0, 2]]
    assert places.snapshots() == [(1, b"after one")]
    assert places.known(0) == (1, 12)
