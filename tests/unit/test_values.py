"""The codec of plain values."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgpack import ExtType, Timestamp
from trees import plain, same

from dataloaderjob.core import values
from dataloaderjob.core.errors import RemoteProtocolError


@given(plain)
def test_value_round_trips_with_its_type_and_bits(value: Any) -> None:
    assert same(values.unpack(values.pack(value)), value)
    assert same(values.unpack(memoryview(values.pack(value))), value)


@given(st.lists(plain, max_size=5))
def test_list_of_a_given_length_round_trips_in_order(items: list[Any]) -> None:
    packed = values.pack_buffer(items)
    assert bytes(packed) == values.pack(items)
    assert same(values.unpack_many(packed, len(items)), items)
    with pytest.raises(RemoteProtocolError, match=f"expected a list of {len(items) + 1} values"):
        values.unpack_many(packed, len(items) + 1)


def test_input_without_the_expected_list_of_values_is_refused() -> None:
    assert values.unpack_many(b"", 0) == []
    for data in (b"", values.pack(5), values.pack((5,))):
        with pytest.raises(RemoteProtocolError, match="expected a list of 1 values"):
            values.unpack_many(data, 1)


@given(plain, st.data())
def test_truncated_value_is_refused(value: Any, data: st.DataObject) -> None:
    packed = values.pack(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(RemoteProtocolError):
        values.unpack(packed[:cut])


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_plain_values_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        values.pack(values.unpack(data))


# What a stranger builds of msgpack's own parts: marks in any place, maps, timestamps, codes that are nobody's.
parts: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(0, 9) | st.builds(ExtType, st.integers(0, 9), st.binary(max_size=16))
    | st.sampled_from([ExtType(code, b"") for code in (4, 5, 6, 7)]) | st.builds(Timestamp, st.integers(-9, 9)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
)  # fmt: skip


@given(parts)
def test_misplaced_parts_decode_to_plain_values_or_are_refused(data: Any) -> None:
    with contextlib.suppress(RemoteProtocolError):
        values.pack(values.unpack(msgpack.packb(data)))


@given(plain, st.data())
def test_a_damaged_value_decodes_or_is_refused(value: Any, data: st.DataObject) -> None:
    packed = bytearray(values.pack(value))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        values.pack(values.unpack(bytes(packed)))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xdb\xff\xff\xff\xff" + bytes(100), id="str"),
        pytest.param(b"\xc6\xff\xff\xff\xff" + bytes(100), id="bytes"),
        pytest.param(b"\xc9\xff\xff\xff\xff" + bytes(100), id="extension"),
        pytest.param(b"\xdd\xff\xff\xff\xff" + bytes(100), id="array"),
        pytest.param(b"\xdf\xff\xff\xff\xff" + bytes(100), id="map"),
        pytest.param(b"\xdd\x00\x00\x80\x00" * 1000 + bytes(30_000), id="arrays-within-arrays"),
    ],
)
def test_a_huge_count_is_refused_before_much_is_allocated(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="cannot be read"):
            values.unpack(data)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < (100_000_000 if len(data) > 1000 else 100_000)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param([ExtType(7, b""), 1], "argument 2 is shorter", id="key-without-a-value"),
        pytest.param([ExtType(7, b""), [], 1], "unhashable", id="list-for-a-key"),
        pytest.param([ExtType(5, b""), []], "unhashable", id="list-in-a-set"),
        pytest.param(ExtType(2, b"short"), "16 bytes", id="half-a-complex"),
        pytest.param(ExtType(99, b""), "unknown extension 99", id="extension"),
    ],
)
def test_part_that_cannot_be_built_is_refused(data: Any, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        values.unpack(msgpack.packb(data))


def test_excess_bytes_after_a_value_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="values of 2 bytes cannot be read: ExtraData"):
        values.unpack(values.pack(5) + b"x")


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(object(), id="object"),
        pytest.param([1, {"a": object()}], id="object-within"),
        pytest.param({(1, object()): 2}, id="object-in-a-key"),
        pytest.param({object()}, id="object-in-a-set"),
        pytest.param(type("Sub", (int,), {})(3), id="subclass-of-int"),
        pytest.param(type("Sub", (dict,), {})(), id="subclass-of-dict"),
        pytest.param([memoryview(b"x")], id="memoryview"),
        pytest.param({"a": {memoryview(b"x"): 1}}, id="memoryview-for-a-key"),
        pytest.param([ExtType(4, b"")], id="mark"),
        pytest.param({"a": Timestamp(1)}, id="timestamp"),
    ],
)
def test_value_that_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(values.NotPlainError) as refused:
        values.pack(value)
    assert type(refused.value.value) not in (*values.SCALARS, list, tuple, dict, set)


@pytest.mark.parametrize(
    "value", [("tuple",), [("tuple",), 1], ["tuple"], {"dict": ("dict",)}, [[]], [()], ()]
)
def test_value_equal_to_a_type_mark_round_trips(value: Any) -> None:
    assert same(values.unpack(values.pack(value)), value)


def test_a_list_within_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(values.NotPlainError, match="deeper than 416"):
        values.pack(loop)


@pytest.mark.parametrize("kind", [list, tuple, frozenset])
def test_values_may_be_nested_to_the_documented_depth(kind: type) -> None:
    value: Any = kind()
    for _ in range(values.MAX_DEPTH - 1):
        value = kind([value])
    assert values.unpack(values.pack(value)) == value
    with pytest.raises(values.NotPlainError, match="deeper than 416"):
        values.pack(kind([value]))


@pytest.mark.parametrize(
    "opening", [b"\x91", b"\x92" + values.pack(())[1:], b"\x81\xa1a"], ids=["list", "tuple", "map"]
)
def test_nesting_of_untrusted_input_is_bounded(opening: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="nested deeper than msgpack can read"):
        values.unpack(opening * 10_000 + b"\xc0")


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


def test_bytes_of_known_values_are_stable() -> None:
    """A change of these changes batches, bundles and records: their versions must be raised with it."""
    value = [
        None, True, -(2**70), 2**64 - 1, 1.5, 2j, "a\ud800", b"b", bytearray(b"c"), (1,), {2, 300}, {("k",): []}
    ]  # fmt: skip
    assert same(values.unpack(values.pack(value)), value)
    assert values.pack(value).hex() == (
        "9cc0c3c709010000000000000000c0cfffffffffffffffffcb3ff8000000000000d8020000000000000000"
        "0000000000000040a461eda080c40162d4036392c700040193c7000502cd012c93c7000792c70004a16b90"
    )


def test_a_large_value_is_copied_once_and_a_bytearray_may_grow_meanwhile() -> None:
    data, changing = b"x" * 20_000_000, bytearray(b"y" * 1000)
    tracemalloc.start()
    try:
        packed = values.pack_buffer([data, changing])
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    changing += b"resized"
    assert peak_nbytes < 45_000_000  # msgpack's buffer has twice the room that it needs
    assert values.unpack(packed) == [data, bytearray(b"y" * 1000)]


def test_keys_are_plain_and_hashable() -> None:
    assert values.is_key(("a", 1, frozenset({None, b"x"})))
    assert values.is_key(math.inf)
    assert not values.is_key(bytearray())
    assert not values.is_key((1, [2]))
