"""Plain Python values as bytes: msgpack, with marks for the types that it lacks. Pure.

This is the only codec for values between processes. Plain scalars are None, bool, int of any size, float, complex, str,
bytes and bytearray. A list, tuple, dict, set or frozenset of plain values is plain, too. An instance of a subclass of
these types is not plain.

| value | in msgpack |
|-------|------------|
| None, bool, int of 64 bits, float, str, bytes | as in msgpack; str as UTF-8, lone surrogates kept |
| a larger int, complex, bytearray | extensions 1 (signed), 2 (two f64), 3; little endian |
| list | array |
| tuple, set, frozenset, dict | array whose first item is a mark, an empty extension: 4, 5, 6, 7 |

The same value has the same bytes in every process, because a set's members are sorted by their encodings. In a dict's
array, keys and values alternate. A dict is not encoded as a map, because msgpack interns the keys of maps. Early
releases of Python 3.12 never free an interned string (python/cpython#113993: 27 KB for each dict of 256 names).
Containers are not encoded as extensions, because their items would then be copied once for each level of nesting.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from typing import Any

from msgpack import ExtType, Packer, unpackb
from msgpack.exceptions import StackError

from dataloaderjob.core.errors import RemoteProtocolError

MAX_DEPTH = 416
"""Maximum depth of nesting. Each level of containers takes a Python frame, and Python's own limit is 1000 frames.
msgpack's limit is at least 511 levels."""
SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_HASHABLE = SCALARS - {bytearray}
_NATIVE = SCALARS - {complex, bytearray}
_INT, _COMPLEX, _BYTEARRAY = 1, 2, 3
_CODES: dict[type, int] = {tuple: 4, set: 5, frozenset: 6, dict: 7}
_MARKS: dict[type, list[Any]] = {list: [], **{kind: [ExtType(code, b"")] for kind, code in _CODES.items()}}
_READ_MARKS = {code: (kind.__name__,) for kind, code in _CODES.items()}
"""The values to which marks are decoded. In untrusted input, a mark that is not the first item of an array is treated
as a plain value."""
_2F64 = struct.Struct("<2d")


class NotPlainError(TypeError):
    """A value that this codec does not support. `value` is the innermost unsupported value."""

    def __init__(self, value: object, why: str = "") -> None:
        self.value = value
        super().__init__(why or f"{type(value).__module__}.{type(value).__qualname__} is not a plain value")


def is_key(value: object) -> bool:
    """Returns True if `value` can be a key of a plain dict. Keys are hashable plain scalars, and tuples and frozensets
    of keys."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(is_key, value))  # type: ignore[call-overload]
    return kind in _HASHABLE


def pack(value: Any) -> bytes:
    """Encodes one value. Raises NotPlainError if it is not plain, or is nested deeper than MAX_DEPTH levels."""
    return bytes(_put(_packer(), value))


def pack_buffer(value: Any) -> memoryview:
    """Encodes one value as `pack` does, with one copy of its bytes instead of two."""
    packer = _packer(autoreset=False)
    _put(packer, value)
    return memoryview(packer.getbuffer())


def _put(packer: Packer, value: Any) -> Any:
    try:
        return packer.pack(_prepared(value, 0))
    except (ValueError, RecursionError) as exc:  # a str, bytes or int of more than 4 GiB
        raise NotPlainError(value, f"a value cannot be packed: {exc}") from exc


def _prepared(value: Any, depth: int) -> Any:
    """Adds marks and extensions to a value. Visits every container, because msgpack would treat a bytearray as
    bytes."""
    kind = type(value)
    if kind in _NATIVE:
        return value
    if kind is complex:
        return ExtType(_COMPLEX, _2F64.pack(value.real, value.imag))
    if kind is bytearray:
        return ExtType(_BYTEARRAY, bytes(value))
    if kind not in _MARKS:
        raise NotPlainError(value)
    if depth >= MAX_DEPTH:
        raise NotPlainError(value, f"values are nested deeper than {MAX_DEPTH} levels")
    items = list(chain.from_iterable(value.items())) if kind is dict else value
    if not _NATIVE.issuperset(map(type, items)):
        items = map(_prepared, items, repeat(depth + 1))
    if kind is set or kind is frozenset:
        items = sorted(items, key=_packer().pack)
    return [*_MARKS[kind], *items]


def _large_int(value: int) -> ExtType:
    return ExtType(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


# After preparation, `default` only sees integers that are too large for msgpack.
_packer = partial(
    Packer, default=_large_int, strict_types=True, unicode_errors="surrogatepass", buf_size=4096
)


def unpack(data: bytes | memoryview) -> Any:
    """Decodes the output of `pack`. Raises RemoteProtocolError on anything else, and never creates a value that is not
    plain."""
    try:
        return unpackb(
            data, list_hook=_container, ext_hook=_extension, unicode_errors="surrogatepass", timestamp=1
        )
    except StackError as exc:
        raise RemoteProtocolError("values are nested deeper than msgpack can read") from exc
    except (ValueError, TypeError, RecursionError, struct.error) as exc:
        # TypeError: an unhashable key or member; ValueError: any error that msgpack finds.
        raise RemoteProtocolError(f"values of {len(data)} bytes cannot be read: {exc!r}") from exc


def unpack_many(data: bytes | memoryview, count: int) -> list[Any]:
    """Decodes a list of `count` values. Empty data is decoded as an empty list. Raises RemoteProtocolError."""
    found = unpack(data) if len(data) else []
    if type(found) is not list or len(found) != count:
        raise RemoteProtocolError(
            f"expected a list of {count} values, got {len(data)} bytes with another value"
        )
    return found


def _extension(code: int, data: bytes) -> Any:
    if code in _READ_MARKS:
        return _READ_MARKS[code]
    if code == _COMPLEX:
        return complex(*_2F64.unpack(data))
    if code == _INT:
        return int.from_bytes(data, "little", signed=True)
    if code == _BYTEARRAY:
        return bytearray(data)
    raise ValueError(f"unknown extension {code}")


def _container(items: list[Any]) -> Any:
    build = _BUILDERS.get(id(items[0])) if items else None
    return items if build is None else build(items[1:])


def _dict(items: list[Any]) -> dict[Any, Any]:
    turns = iter(items)
    return dict(zip(turns, turns, strict=True))


# Keyed by the identity of the decoded mark, because a tuple that merely equals it is user data.
_BUILDERS: dict[int, Callable[[list[Any]], Any]] = {
    id(_READ_MARKS[code]): _dict if kind is dict else kind for kind, code in _CODES.items()
}
