"""The digest of a batch stands for its place, its keys and each of its bytes, whoever made it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trees import plain

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.batches.digest import batch_digest, batch_digests
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core import digests, layout
from dataloaderjob.core.consumption import error_mark
from dataloaderjob.core.errors import UnsupportedBatch
from dataloaderjob.core.ticket_codec import Ticket
from dataloaderjob.making.fetcher import identity_of

U64 = st.integers(0, 2**64 - 1)
tensors = st.lists(st.integers(0, 3), max_size=3).map(
    lambda shape: torch.ones(shape).cumsum(0) if shape else torch.ones(())
)
leaves = plain | tensors
batches = leaves | st.lists(leaves, max_size=3) | st.dictionaries(st.text(max_size=3), leaves, max_size=3)


def sealed(batch: Any, identity: int = 7) -> bytearray:
    """A body as a builder leaves it in shared memory."""
    body = bytearray(b"".join(encode(batch, allow_pickle=True).buffers))
    with memoryview(body) as view:
        digests.seal(view, identity)
    return body


def seal_of(body: bytearray) -> tuple[int, int]:
    return layout.SEAL.unpack_from(body)


@given(batches, U64)
def test_batch_has_the_same_digest_in_process_and_in_transit(batch: Any, identity: int) -> None:
    body = sealed(batch, identity)
    assert seal_of(body) == (batch_digest(batch, identity, allow_pickle=True), identity)
    assert digests.intact(memoryview(body))


@given(batches, st.data())
def test_one_flipped_bit_anywhere_in_a_body_is_noticed(batch: Any, data: st.DataObject) -> None:
    body = sealed(batch)
    bit = data.draw(st.integers(0, 8 * len(body) - 1))
    body[bit // 8] ^= 1 << bit % 8
    assert not digests.intact(memoryview(body))


def test_digests_never_change_between_versions() -> None:
    """Records and checkpoints have them."""
    identity = digests.identity(3, 24, True, [5, -1])
    body = bytearray(16) + b"body"
    assert (identity, digests.seal(memoryview(body), identity)) == (0x1C5D05B96FC764C2, 0xBAE5D3C43863021C)


@pytest.mark.parametrize("nbytes", [0, 8, 16])
def test_body_too_short_for_a_batch_is_not_intact(nbytes: int) -> None:
    assert not digests.intact(memoryview(bytes(nbytes)))


def ticket(keys: Any, *, first: int = 0, bare: bool = False) -> Ticket:
    return Ticket(1, first, bare, keys)


@given(st.lists(st.integers(-(2**70), 2**70), max_size=20), st.integers(0, 2**40))
def test_equal_keys_have_one_identity_in_any_container(keys: list[int], number: int) -> None:
    one = identity_of(number, ticket(keys))
    assert identity_of(number, ticket(tuple(keys))) == one
    if all(-(2**63) <= key < 2**63 for key in keys):
        assert identity_of(number, ticket(np.array(keys, np.int64))) == one
        assert identity_of(number, ticket(torch.tensor(keys, dtype=torch.int64))) == one
        assert identity_of(number, ticket([np.int64(key) for key in keys])) == one


@pytest.mark.parametrize(
    ("number", "other"),
    [
        pytest.param(3, ticket([1, 2, 4]), id="another-key"),
        pytest.param(3, ticket([2, 1, 3]), id="keys-that-changed-places"),
        pytest.param(3, ticket([1, 2]), id="a-key-less"),
        pytest.param(4, ticket([1, 2, 3]), id="another-batch-of-the-epoch"),
        pytest.param(3, ticket([1, 2, 3], first=1), id="another-position"),
        pytest.param(3, ticket([1, 2, 3], bare=True), id="bare"),
        pytest.param(3, ticket(["1", 2, 3]), id="a-key-of-another-kind"),
    ],
)
def test_identity_differs_by_position_and_keys(number: int, other: Ticket) -> None:
    assert identity_of(3, ticket([1, 2, 3])) != identity_of(number, other)


def test_the_seed_is_not_part_of_the_identity() -> None:
    assert identity_of(3, Ticket(1, 0, False, [5])) == identity_of(3, Ticket(2, 0, False, [5]))


def test_batches_with_different_digests_share_one_schema() -> None:
    decoder = Decoder(allow_pickle=False)
    plans = []
    for number in range(3):
        body = np.frombuffer(sealed({"x": torch.full((4,), float(number)), "n": number}, number), np.uint8)
        plans.append(decoder.plan(body.data, 0, len(body)))
        assert decoder.decode(body)["n"] == number
    assert plans[0] is plans[1] is plans[2]


def test_unsendable_batch_counts_by_its_error() -> None:
    found = batch_digest([lambda: None], 7, allow_pickle=False)
    assert found == error_mark(UnsupportedBatch())
    assert found != batch_digest([None], 7, allow_pickle=False)


def test_unsendable_batches_are_distinguished_by_position() -> None:
    (mark, first), (same, second) = (
        batch_digests([lambda: None], place, allow_pickle=False) for place in (7, 8)
    )
    assert mark == same
    assert first != second
    assert len(set(batch_digests([1], 7, allow_pickle=False))) == 1


def test_digest_of_known_bytes_is_stable() -> None:
    """A change of the format changes recorded digests: `layout.VERSION` must be raised with it."""
    found = batch_digest({"x": torch.arange(3), "y": ["a", 1.5]}, 1, allow_pickle=False)
    assert (layout.VERSION, f"{found:016x}") == (5, "66c5ccfe9dc239d4")
