"""Values of the standard library, torch and numpy that are sent as plain content. `VALUES` has a carrier for each
class.

Content comes from a feeder, so it is checked before use: its types must be exactly those that `take` returns. Other
objects could run code in `__index__`, `__iter__` or `__fspath__`. Text in place of a number could take hours to parse.
"""

from __future__ import annotations

import array
import datetime as dt
import pathlib
import re
import uuid
import zoneinfo
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import EllipsisType, NoneType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from dataloaderjob.batches.special import Carrier, StaysError, exactly, no_content
from dataloaderjob.core import values

_MAX_BITS = 1 << 20
"""Maximum number of bits in a fraction's numerator or denominator, because reducing a fraction takes quadratic time."""
_ZONE = re.compile(r"[A-Za-z][\w+-]*(?:/[A-Za-z][\w+-]*){0,2}", re.ASCII)
_Kinds = tuple[type, ...]


def is_one(content: Any, kind: type) -> Any:
    """Returns `content` if its type is exactly `kind`. Raises TypeError otherwise."""
    return exactly((content,), kind)[0]


def value(
    take: Callable[[Any], Any],
    make: Callable[[Any], Any],
    *,
    attributes: bool = False,
    shared: bool = False,
) -> Carrier:
    """Returns a carrier for objects of one known class, so that `make` needs only the content."""
    return Carrier(
        take=take, make=lambda cls, content: make(content), attributes=attributes, shared=shared  # noqa: ARG005
    )  # fmt: skip


def _of(take: Callable[[Any], Any], make: Callable[..., Any], *kinds: type | _Kinds) -> Carrier:
    """Returns a carrier for values that `make` builds from parts with exactly the types in `kinds`."""
    return value(take, lambda content: make(*exactly(content, *kinds)))


def _of_one(take: Callable[[Any], Any], make: Callable[[Any], Any], kind: type) -> Carrier:
    return value(take, lambda content: make(is_one(content, kind)))


def _time(*parts: Any) -> dt.time:
    return dt.time(*parts[:5], fold=parts[5])


def _datetime(*parts: Any) -> dt.datetime:
    return dt.datetime(*parts[:8], fold=parts[8])


_TZ = (NoneType, dt.timezone, zoneinfo.ZoneInfo)


def _tzinfo(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the parts of a time unchanged. Raises StaysError if the class of its time zone is not one of `_TZ`."""
    zone = parts[-2]
    if zone is not None and type(zone) not in _TZ:
        raise StaysError(f" in a zone of type {type(zone).__name__}")
    return parts


def _take_zone(zone: zoneinfo.ZoneInfo) -> str:
    if zone.key is None or not _ZONE.fullmatch(zone.key):
        raise StaysError(" without a name in the time zone database")
    return str(zone)


def _make_zone(key: str) -> zoneinfo.ZoneInfo:
    """Returns the time zone `key` from this machine's own database. Raises ValueError if `key` is not a plain zone
    name, because such a key could open other files or modules."""
    if not _ZONE.fullmatch(key):
        raise ValueError(f"there is no time zone named {key!r}")
    return zoneinfo.ZoneInfo(key)


def _take_fraction(fraction: Fraction) -> tuple[int, int]:
    parts = fraction.numerator, fraction.denominator
    if max(part.bit_length() for part in parts) > _MAX_BITS:
        raise StaysError(f" of more than {_MAX_BITS} bits")
    return parts


def _make_fraction(numerator: int, denominator: int) -> Fraction:
    if max(numerator.bit_length(), denominator.bit_length()) > _MAX_BITS:
        raise ValueError(f"a fraction has more than {_MAX_BITS} bits")
    return Fraction(numerator, denominator)


def _make_timezone(content: Any) -> dt.timezone:
    kinds = (dt.timedelta, str) if type(content) is tuple and len(content) == 2 else (dt.timedelta,)
    return dt.timezone(*exactly(content, *kinds))


def _take_dtype(dtype: np.dtype[Any]) -> Any:
    descr = np.lib.format.dtype_to_descr(dtype)
    if np.lib.format.descr_to_dtype(descr) != dtype:
        raise StaysError(f" {dtype!r}")
    return descr


def _make_dtype(descr: Any) -> np.dtype[Any]:
    values.pack(descr)  # raises unless this is a plain value: numpy would ask an object for its dtype
    return np.lib.format.descr_to_dtype(descr)


def _named_in_torch(kind: type) -> Carrier:
    """Returns a carrier for objects such as torch.float32, which are sent as their name in torch."""

    def make(name: str) -> Any:
        found = vars(torch).get(name.removeprefix("torch."))  # getattr might import a module
        if type(found) is not kind:
            raise TypeError(f"{name} is not a {kind.__name__}")
        return found

    return _of_one(str, make, str)


def _make_array(content: Any) -> array.array[Any]:
    code, data = exactly(content, str, bytes)
    return array.array(code, data)


def _make_deque(content: Any) -> deque[Any]:
    return deque(*exactly(content, list, (int, NoneType)))


_INTS3, _INTS4 = (int, int, int), (int, int, int, int)
VALUES: dict[type, Carrier] = {
    dt.date: _of(lambda d: (d.year, d.month, d.day), dt.date, *_INTS3),
    dt.time: _of(
        lambda t: _tzinfo((t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold)),
        _time, *_INTS4, _TZ, int,
    ),
    dt.datetime: _of(
        lambda d: _tzinfo((d.year, d.month, d.day, d.hour, d.minute, d.second, d.microsecond, d.tzinfo, d.fold)),
        _datetime, *_INTS3, *_INTS4, _TZ, int,
    ),
    dt.timedelta: _of(lambda d: (d.days, d.seconds, d.microseconds), dt.timedelta, *_INTS3),
    dt.timezone: value(lambda z: z.__getinitargs__(), _make_timezone),
    zoneinfo.ZoneInfo: _of_one(_take_zone, _make_zone, str),
    Decimal: _of_one(str, Decimal, str),
    Fraction: _of(_take_fraction, _make_fraction, int, int),
    uuid.UUID: _of(
        lambda u: (int(u.int), u.is_safe.value),
        lambda number, safe: uuid.UUID(int=number, is_safe=uuid.SafeUUID(safe)), int, (int, NoneType),
    ),
    pathlib.PosixPath: _of_one(str, pathlib.PosixPath, str),
    pathlib.PurePosixPath: _of_one(str, pathlib.PurePosixPath, str),
    pathlib.PureWindowsPath: _of_one(str, pathlib.PureWindowsPath, str),
    range: _of(lambda r: (int(r.start), int(r.stop), int(r.step)), range, *_INTS3),
    slice: value(lambda s: (s.start, s.stop, s.step), lambda content: slice(*is_one(content, tuple))),
    EllipsisType: value(no_content, lambda content: ...),  # noqa: ARG005
    array.array: value(lambda a: (a.typecode, a.tobytes()), _make_array, shared=True),
    deque: value(lambda d: (list(d), d.maxlen), _make_deque, shared=True),
    SimpleNamespace: value(no_content, lambda content: SimpleNamespace(), attributes=True, shared=True),  # noqa: ARG005
    torch.device: _of_one(str, torch.device, str),
    torch.dtype: _named_in_torch(torch.dtype),
    torch.layout: _named_in_torch(torch.layout),
    torch.memory_format: _named_in_torch(torch.memory_format),
}  # fmt: skip
WAYS = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in VALUES}
DTYPE = value(_take_dtype, _make_dtype)
