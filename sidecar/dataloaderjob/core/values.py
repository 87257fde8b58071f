"""Plain Python values as bytes: tag, length, content. Pure; the only codec of values between processes.

Plain are None, bool, int of any size, float, complex, str, bytes, bytearray and list, tuple, dict, set,
frozenset of plain values, by their exact types (a subclass is not plain). Integers are little endian.

| tag | content |
|-----|---------|
| NONE TRUE FALSE | nothing |
| INT | i64 |
| BIGINT | u64 length, signed integer |
| FLOAT, COMPLEX | one f64, two |
| STR BYTES BYTEARRAY | u64 length, content (str: UTF-8, lone surrogates kept) |
| LIST TUPLE SET FROZENSET | u64 count, then the values; a set's in the order of their encodings |
| DICT | u64 count, then key, value, key, value, ... in insertion order |
| LIST or TUPLE + INTS, FLOATS | u64 count, then i64 or f64 each: no tag per value |
| LIST or TUPLE + STRS | u64 count, u64 length of each in characters, then one STR that joins them |

The same value has the same bytes in every process: hash randomisation moves a set's members, not these.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from dataloaderjob.core.errors import RemoteProtocolError

NONE, TRUE, FALSE, INT, BIGINT, FLOAT, COMPLEX, STR, BYTES, BYTEARRAY = range(10)
LIST, TUPLE, SET, FROZENSET, DICT = range(16, 21)
INTS, FLOATS, STRS = 32, 64, 96
"""Added to LIST or TUPLE."""
MAX_DEPTH = 416
"""Each level of lists is a frame of Python, and Python's own limit is 1000 of them."""
SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_HASHABLE = SCALARS - {bytearray}
_NONE, _TRUE, _FALSE = bytes([NONE]), bytes([TRUE]), bytes([FALSE])
_COUNT = struct.Struct("<BQ")
_INT = struct.Struct("<Bq")
_FLOAT = struct.Struct("<Bd")
_COMPLEX = struct.Struct("<Bdd")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_2F64 = struct.Struct("<dd")
_UTF8 = ("utf-8", "surrogatepass")

Part = bytes | memoryview
Unpacked = tuple[Any, int]
"""A value, and the offset behind it."""


class NotPlainError(TypeError):
    """A value that this codec does not carry. `value` is the innermost one."""

    def __init__(self, value: object, why: str = "") -> None:
        self.value = value
        super().__init__(why or f"{type(value).__module__}.{type(value).__qualname__} is not a plain value")


def is_key(value: object) -> bool:
    """Whether `value` can be a dict's key here: a plain scalar, or tuples and frozensets of such."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(is_key, value))  # type: ignore[call-overload]
    return kind in _HASHABLE


def pack(value: Any) -> bytes:
    """Encodes one value. Raises NotPlainError."""
    parts: list[Part] = []
    pack_into(parts, value)
    return b"".join(parts)


def pack_into(parts: list[Part], value: Any, depth: int = 0) -> None:
    """Appends the encoding of `value` to `parts`; large bytes are appended as they are, not copied.

    Raises NotPlainError for other types and for values nested deeper than MAX_DEPTH.
    """
    try:
        packer = _PACKERS[type(value)]
    except KeyError:
        raise NotPlainError(value) from None
    if depth > MAX_DEPTH:
        raise NotPlainError(value, f"values are nested deeper than {MAX_DEPTH} levels")
    packer(parts, value, depth)


def _pack_none(parts: list[Part], value: None, depth: int) -> None:  # noqa: ARG001
    parts.append(_NONE)


def _pack_bool(parts: list[Part], value: bool, depth: int) -> None:  # noqa: ARG001
    parts.append(_TRUE if value else _FALSE)


def _pack_int(parts: list[Part], value: int, depth: int) -> None:  # noqa: ARG001
    if -(1 << 63) <= value < 1 << 63:
        parts.append(_INT.pack(INT, value))
        return
    nbytes = value.bit_length() // 8 + 1
    parts.append(_COUNT.pack(BIGINT, nbytes) + value.to_bytes(nbytes, "little", signed=True))


def _pack_float(parts: list[Part], value: float, depth: int) -> None:  # noqa: ARG001
    parts.append(_FLOAT.pack(FLOAT, value))


def _pack_complex(parts: list[Part], value: complex, depth: int) -> None:  # noqa: ARG001
    parts.append(_COMPLEX.pack(COMPLEX, value.real, value.imag))


def _pack_str(parts: list[Part], value: str, depth: int) -> None:  # noqa: ARG001
    data = value.encode(*_UTF8)
    parts.append(_COUNT.pack(STR, len(data)))
    parts.append(data)


def _pack_bytes(parts: list[Part], value: bytes, depth: int) -> None:  # noqa: ARG001
    parts.append(_COUNT.pack(BYTES, len(value)))
    parts.append(value)


def _pack_bytearray(parts: list[Part], value: bytearray, depth: int) -> None:  # noqa: ARG001
    # A copy: a view would forbid the owner to resize it.
    parts.append(_COUNT.pack(BYTEARRAY, len(value)))
    parts.append(bytes(value))


def _pack_sequence(parts: list[Part], value: list[Any] | tuple[Any, ...], depth: int) -> None:
    tag = LIST if type(value) is list else TUPLE
    n = len(value)
    kinds = set(map(type, value))
    if kinds == {int} and _pack_ints(parts, tag, value):
        return
    if kinds == {float}:
        parts.append(_counted(n, "d")(tag + FLOATS, n, *value))
    elif kinds == {str}:
        parts.append(_COUNT.pack(tag + STRS, n) + struct.pack(f"<{n}Q", *map(len, value)))
        _pack_str(parts, "".join(value), depth)
    else:
        if depth >= MAX_DEPTH:
            raise NotPlainError(value, f"values are nested deeper than {MAX_DEPTH} levels")
        parts.append(_COUNT.pack(tag, n))
        for item in value:  # as pack_into does it, without a call: a third of what it takes to encode a batch
            packer = _PACKERS.get(type(item))
            if packer is None:
                raise NotPlainError(item)
            packer(parts, item, depth + 1)


def _pack_ints(parts: list[Part], tag: int, value: list[int] | tuple[int, ...]) -> bool:
    try:
        parts.append(_counted(len(value), "q")(tag + INTS, len(value), *value))
    except struct.error:
        return False
    return True


@lru_cache(maxsize=64)
def _counted(count: int, letter: str) -> Callable[..., bytes]:
    return struct.Struct(f"<BQ{count}{letter}").pack


def _pack_set(parts: list[Part], value: set[Any] | frozenset[Any], depth: int) -> None:
    parts.append(_COUNT.pack(SET if type(value) is set else FROZENSET, len(value)))
    items = []
    for item in value:
        own: list[Part] = []
        pack_into(own, item, depth + 1)
        items.append(b"".join(own))
    parts.extend(sorted(items))


def _pack_dict(parts: list[Part], value: dict[Any, Any], depth: int) -> None:
    parts.append(_COUNT.pack(DICT, len(value)))
    for key, item in value.items():
        if not is_key(key):
            raise NotPlainError(key)
        pack_into(parts, key, depth + 1)
        pack_into(parts, item, depth + 1)


_PACKERS: dict[type, Callable[[list[Part], Any, int], None]] = {
    type(None): _pack_none,
    bool: _pack_bool,
    int: _pack_int,
    float: _pack_float,
    complex: _pack_complex,
    str: _pack_str,
    bytes: _pack_bytes,
    bytearray: _pack_bytearray,
    list: _pack_sequence,
    tuple: _pack_sequence,
    set: _pack_set,
    frozenset: _pack_set,
    dict: _pack_dict,
}


def unpack(data: bytes | memoryview) -> Any:
    """Decodes what `pack` made. Raises RemoteProtocolError on anything else."""
    (value,) = unpack_many(data, 1)
    return value


def unpack_many(data: bytes | memoryview, count: int) -> list[Any]:
    """Decodes `count` values that fill `data` to its end. Raises RemoteProtocolError."""
    found: list[Any] = []
    at = 0
    try:
        for _ in range(count):
            value, at = _UNPACKERS[data[at]](data, at + 1, 0)
            found.append(value)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError, struct.error) as exc:
        # TypeError: an unhashable key or member; ValueError: bad UTF-8.
        raise RemoteProtocolError(f"values cannot be read at byte {at} of {len(data)}: {exc!r}") from exc
    if at != len(data):
        raise RemoteProtocolError(f"{count} values end at byte {at}, {len(data)} came")
    return found


def _deeper(depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    return depth + 1


def _length(data: Part, at: int, item_nbytes: int = 1) -> Unpacked:
    """A count whose items, `item_nbytes` each at least, can be in `data`: checked before allocating."""
    (n,) = _U64.unpack_from(data, at)
    if n * item_nbytes > len(data) - at - 8:
        raise ValueError(f"{n} items of {item_nbytes} bytes are more than came")
    return n, at + 8


def _constant(value: Any) -> Callable[[Part, int, int], Unpacked]:
    return lambda data, at, depth: (value, at)  # noqa: ARG005


def _unpack_int(data: Part, at: int, depth: int) -> Unpacked:  # noqa: ARG001
    return _I64.unpack_from(data, at)[0], at + 8


def _unpack_bigint(data: Part, at: int, depth: int) -> Unpacked:  # noqa: ARG001
    n, at = _length(data, at)
    return int.from_bytes(data[at : at + n], "little", signed=True), at + n


def _unpack_float(data: Part, at: int, depth: int) -> Unpacked:  # noqa: ARG001
    return _F64.unpack_from(data, at)[0], at + 8


def _unpack_complex(data: Part, at: int, depth: int) -> Unpacked:  # noqa: ARG001
    return complex(*_2F64.unpack_from(data, at)), at + 16


def _unpack_str(data: Part, at: int, depth: int) -> Unpacked:  # noqa: ARG001
    n, at = _length(data, at)
    return str(data[at : at + n], *_UTF8), at + n


def _unpack_bytes(data: Part, at: int, depth: int) -> Unpacked:  # noqa: ARG001
    n, at = _length(data, at)
    return bytes(data[at : at + n]), at + n


def _unpack_bytearray(data: Part, at: int, depth: int) -> Unpacked:  # noqa: ARG001
    n, at = _length(data, at)
    return bytearray(data[at : at + n]), at + n


def _sequence(build: Callable[[Any], Any]) -> Callable[[Part, int, int], Unpacked]:
    def unpack_sequence(data: Part, at: int, depth: int) -> Unpacked:
        n, at = _length(data, at)
        items, depth = [], _deeper(depth)
        for _ in range(n):
            item, at = _UNPACKERS[data[at]](data, at + 1, depth)
            items.append(item)
        return build(items), at

    return unpack_sequence


def _packed(build: Callable[[Any], Any], letter: str) -> Callable[[Part, int, int], Unpacked]:
    def unpack_packed(data: Part, at: int, depth: int) -> Unpacked:  # noqa: ARG001
        n, at = _length(data, at, 8)
        return build(struct.unpack_from(f"<{n}{letter}", data, at)), at + 8 * n

    return unpack_packed


def _strings(build: Callable[[Any], Any]) -> Callable[[Part, int, int], Unpacked]:
    def unpack_strings(data: Part, at: int, depth: int) -> Unpacked:
        n, at = _length(data, at, 8)
        lengths = struct.unpack_from(f"<{n}Q", data, at)
        if data[at + 8 * n] != STR:
            raise ValueError("a list of strings lacks its text")
        text, at = _unpack_str(data, at + 8 * n + 1, depth)
        ends = list(accumulate(lengths, initial=0))
        if ends[-1] != len(text):
            raise ValueError(f"strings of {ends[-1]} characters are promised, {len(text)} came")
        return build([text[a:b] for a, b in pairwise(ends)]), at

    return unpack_strings


def _unpack_dict(data: Part, at: int, depth: int) -> Unpacked:
    n, at = _length(data, at, 2)
    found: dict[Any, Any] = {}
    depth = _deeper(depth)
    for _ in range(n):
        key, at = _UNPACKERS[data[at]](data, at + 1, depth)
        found[key], at = _UNPACKERS[data[at]](data, at + 1, depth)
    return found, at


_UNPACKERS: dict[int, Callable[[Part, int, int], Unpacked]] = {
    NONE: _constant(None),
    TRUE: _constant(True),
    FALSE: _constant(False),
    INT: _unpack_int,
    BIGINT: _unpack_bigint,
    FLOAT: _unpack_float,
    COMPLEX: _unpack_complex,
    STR: _unpack_str,
    BYTES: _unpack_bytes,
    BYTEARRAY: _unpack_bytearray,
    SET: _sequence(set),
    FROZENSET: _sequence(frozenset),
    DICT: _unpack_dict,
}
for _tag, _type in ((LIST, list), (TUPLE, tuple)):
    _UNPACKERS[_tag] = _sequence(_type)
    _UNPACKERS[_tag + INTS] = _packed(_type, "q")
    _UNPACKERS[_tag + FLOATS] = _packed(_type, "d")
    _UNPACKERS[_tag + STRS] = _strings(_type)
