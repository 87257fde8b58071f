"""Batch trees for tests: strategies of plain values, comparison in bits, a trip through the codec."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dataloaderjob.batches.decoding import Decoder
from dataloaderjob.batches.digest import digest_update
from dataloaderjob.batches.encoding import encode
from dataloaderjob.core import values

Point = collections.namedtuple("Point", ["x", "y"])  # noqa: PYI024


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = 5


text = st.text(st.characters(exclude_categories=[]), max_size=20)  # lone surrogates as well
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | text
scalars |= st.binary(max_size=50) | st.binary(max_size=50).map(bytearray)
plain: st.SearchStrategy[Any] = st.recursive(
    scalars | st.lists(st.integers()) | st.lists(st.floats()) | st.lists(text).map(tuple),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=5)
        | st.sets(keys, max_size=5)
        | st.frozensets(keys, max_size=5)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal in types and bits: NaN equals NaN, 0.0 differs from -0.0, 1 from True."""
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return struct.pack("d", a) == struct.pack("d", b)
    if type(a) is complex:
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, set | frozenset):
        return sorted(map(values.pack, a)) == sorted(map(values.pack, b))
    return bool(a == b)


def body(batch: Any, *, allow_pickle: bool = False) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes that would lie in the pool; 64-byte aligned as there."""
    encoded = encode(batch, allow_pickle=allow_pickle)
    assert sum(map(len, encoded.buffers)) == encoded.nbytes
    assert all(len(b) > 0 for b in encoded.buffers)
    pool = np.zeros(encoded.nbytes + 64, np.uint8)
    start = -pool.ctypes.data % 64
    found = pool[start : start + encoded.nbytes]
    found[:] = np.frombuffer(b"".join(encoded.buffers), np.uint8)
    return found


def trip(batch: Any, *, allow_pickle: bool = False) -> Any:
    return Decoder(allow_pickle=allow_pickle).decode(body(batch, allow_pickle=allow_pickle))


def digest(batch: Any) -> str:
    hasher = hashlib.sha256()
    digest_update(hasher, batch)
    return hasher.hexdigest()
