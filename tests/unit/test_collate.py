"""`keep_bytes`: encoded samples stay encoded."""

from __future__ import annotations

import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from dataloaderjob.collate import RaggedBytes, keep_bytes


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=8))
def test_strings_round_trip_as_views_of_one_buffer(strings: list[bytes]):
    found = keep_bytes(strings)
    assert isinstance(found, RaggedBytes)
    assert [bytes(view.tolist()) for view in found.views()] == strings
    assert found.data.numel() == sum(map(len, strings))
    assert (found.data.dtype, found.offsets.dtype) == (torch.uint8, torch.int64)
    assert all(
        view.untyped_storage().data_ptr() == found.data.untyped_storage().data_ptr() for view in found.views()
    )


def test_strings_within_samples_are_found_and_the_rest_equals_torchs():
    samples = [{"jpeg": b"abc", "y": 1, "name": "a"}, {"jpeg": bytearray(b"de"), "y": 2, "name": "b"}]
    found = keep_bytes(samples)
    assert [bytes(view.tolist()) for view in found["jpeg"].views()] == [b"abc", b"de"]
    rest = [{"y": sample["y"], "name": sample["name"]} for sample in samples]
    expected = default_collate(rest)
    assert found["name"] == expected["name"]
    assert torch.equal(found["y"], expected["y"])
    first, second = keep_bytes([(b"x", 1.5), (b"", 2.5)])
    assert [view.numel() for view in first.views()] == [1, 0]
    assert second.tolist() == [1.5, 2.5]


def test_torchs_own_collate_is_left_unchanged():
    keep_bytes([b"x"])
    assert default_collate([b"x", b"y"]) == [b"x", b"y"]
    assert pickle.loads(pickle.dumps(keep_bytes)) is keep_bytes
