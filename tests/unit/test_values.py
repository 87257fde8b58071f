"""The codec of plain values."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import plain, same

from dataloaderjob.core import values
from dataloaderjob.core.errors import RemoteProtocolError


@given(plain)
def test_a_value_comes_back_the_same_in_type_and_bits(value: Any) -> None:
    assert same(values.unpack(values.pack(value)), value)
    assert same(values.unpack(memoryview(values.pack(value))), value)


@given(st.lists(plain, max_size=5))
def test_values_one_after_the_other_come_back_in_order(items: list[Any]) -> None:
    parts: list[bytes | memoryview] = []
    for item in items:
        values.pack_into(parts, item)
    assert same(values.unpack_many(b"".join(parts), len(items)), items)


@given(plain, st.data())
def test_a_cut_value_is_refused(value: Any, data: st.DataObject) -> None:
    packed = values.pack(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(RemoteProtocolError):
        values.unpack(packed[:cut])


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        values.unpack(data)


@given(plain, st.data())
def test_a_damaged_value_decodes_or_is_refused(value: Any, data: st.DataObject) -> None:
    packed = bytearray(values.pack(value))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        values.unpack(bytes(packed))


@pytest.mark.parametrize(
    "tag",
    [
        values.STR,
        values.LIST,
        values.DICT,
        values.LIST + values.INTS,
        values.TUPLE + values.STRS,
        values.BIGINT,
    ],
)
def test_a_huge_count_is_refused_before_anything_is_allocated(tag: int) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        values.unpack(struct.pack("<BQ", tag, 1 << 62) + bytes(100))


def test_bytes_behind_the_value_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="1 values end at byte 9, 10 came"):
        values.unpack(values.pack(5) + b"x")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(object(), id="object"),
        pytest.param([1, {"a": object()}], id="object-within"),
        pytest.param({(1, object()): 2}, id="object-in-a-key"),
        pytest.param(type("Sub", (int,), {})(3), id="subclass-of-int"),
        pytest.param(type("Sub", (dict,), {})(), id="subclass-of-dict"),
    ],
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(values.NotPlainError):
        values.pack(value)


def test_a_list_within_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(values.NotPlainError, match="deeper than 416"):
        values.pack(loop)


def test_depth_of_a_stranger_is_bounded() -> None:
    deep = struct.pack("<BQ", values.LIST, 1) * 10_000 + values.pack(None)
    with pytest.raises(RemoteProtocolError, match="deeper than 416"):
        values.unpack(deep)


def test_a_set_has_the_same_bytes_under_any_hash_seed() -> None:
    code = "from dataloaderjob.core import values; print(values.pack({'a', 'b', 'c', ('d', 1)}).hex())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in range(3)
    }  # fmt: skip
    assert len(found) == 1


def test_bytes_are_not_copied_and_bytearrays_are() -> None:
    data, changing = b"x" * 1000, bytearray(b"y" * 1000)
    parts: list[bytes | memoryview] = []
    values.pack_into(parts, [data, changing])
    changing += b"resized"
    assert any(part is data for part in parts)
    assert values.unpack(b"".join(parts)) == [data, bytearray(b"y" * 1000)]


def test_homogeneous_lists_take_eight_bytes_a_number() -> None:
    assert len(values.pack(list(range(256)))) == 9 + 8 * 256
    assert len(values.pack([0.5] * 256)) == 9 + 8 * 256


def test_keys_are_plain_and_hashable() -> None:
    assert values.is_key(("a", 1, frozenset({None, b"x"})))
    assert values.is_key(math.inf)
    assert not values.is_key(bytearray())
    assert not values.is_key((1, [2]))
