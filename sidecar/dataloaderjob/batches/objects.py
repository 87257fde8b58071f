"""Objects that travel taken apart: values of the standard library, enums, subclasses of built-in types, instances.

`take_apart` finds the way for an object; `CARRIERS` has all ways, under their names in schemas. To add a way, add an
entry to `_VALUES` for one exact type, or to `CARRIERS` with a case in `_way`.
"""

from __future__ import annotations

import array
import dataclasses
import datetime as dt
import pathlib
import sys
import uuid
import zoneinfo
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from types import EllipsisType, MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from dataloaderjob.batches import graphs, special
from dataloaderjob.batches.special import Carrier, StaysError, attributes_beside, is_rebuilt_from, no_content
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.layout import ClassName
from dataloaderjob.shipping import user_code

BASES = (str, bytes, bytearray, int, float, complex, list, tuple, set, frozenset, dict)
"""Built-in types whose subclasses travel as their content and `__dict__`."""
LOCAL = ", a class made inside a function: define it at the top level of a module"
_CHANGES: dict[Any, Callable[[Any, Any], None]] = {
    list: list.extend, set: set.update, dict: dict.update, bytearray: bytearray.extend,
}  # fmt: skip
_WHOLE = slice(None)
_CONTENTS: dict[Any, Callable[[Any], Any]] = {
    str: lambda item: str.__getitem__(item, _WHOLE),
    bytes: lambda item: bytes.__getitem__(item, _WHOLE),
    bytearray: lambda item: bytearray.__getitem__(item, _WHOLE),
    list: lambda item: list.__getitem__(item, _WHOLE),
    tuple: lambda item: tuple.__getitem__(item, _WHOLE),
    int: lambda item: int.__add__(item, 0),
    float: float.__float__,
    complex: lambda item: complex(complex.real.__get__(item), complex.imag.__get__(item)),
    set: lambda item: set(set.__iter__(item)),
    frozenset: lambda item: frozenset(frozenset.__iter__(item)),
    dict: lambda item: dict(dict.items(item)),
}
"""Functions that return the content of a subclass's object as exactly the built-in type, despite any overrides."""


class Apart(NamedTuple):
    """An object taken apart."""

    way: str
    cls: ClassName | None
    content: Any
    attributes: dict[str, Any]


def take_apart(item: Any) -> Apart:
    """Takes `item` apart. Raises StaysError."""
    way = _way(item)
    carrier, cls = CARRIERS[way], None
    if carrier.fits is not None:
        cls = user_code.class_name(type(item) if carrier.named is None else carrier.named(type(item)))
        if cls is None:
            raise StaysError(LOCAL)
    attributes = attributes_beside(item) if carrier.attributes else {}
    return Apart(way, cls, carrier.take(item), attributes)


def is_dataclass(item: object) -> bool:
    """True if `item` consists only of its fields; a dataclass that is also a list has further content."""
    return (
        dataclasses.is_dataclass(item)
        and not isinstance(item, (type, Enum, torch.Tensor, np.ndarray))
        and not isinstance(item, BASES)
    )


_STANDARD_MAPPINGS = (dict, OrderedDict, Counter, UserDict, ChainMap, MappingProxyType)
_REBUILT_FROM_ATTRIBUTES = frozenset({"transformers.tokenization_utils_base.BatchEncoding"})
"""Mappings of libraries with their own `__getstate__` that returns only their attributes."""


def is_made_from_dict(cls: type) -> bool:
    """True if a mapping of this class is made by calling the class with a dict.

    Mappings of the standard library that are more than a dict, such as `shelve.Shelf`, open files or unpickle their
    content; a class with `__del__` owns resources.
    """
    return (
        issubclass(cls, Mapping)
        and not hasattr(cls, "__del__")
        and (cls in _STANDARD_MAPPINGS or not _is_of_standard_library(cls))
    )


def is_rebuilt_from_attributes(cls: type) -> bool:
    """True if attributes may be set on a mapping of this class, because it consists only of items and attributes.

    A library's mapping that is not a dict may read files that its attributes name. Among those, only the user's own
    mappings are accepted.
    """
    return (
        is_rebuilt_from(cls, dict)
        or is_rebuilt_from(cls, UserDict)
        or user_code.is_users(cls)
        or user_code.full_name(cls) in _REBUILT_FROM_ATTRIBUTES
    )


def made_from_dict(cls: Any, items: dict[Any, Any]) -> Any:
    """Makes the mapping from a dict, as torch's default_collate does; returns None if the class cannot."""
    if not is_made_from_dict(cls):
        return None
    try:
        made = cls(items)
        return made if len(made) == len(items) and isinstance(made, cls) else None
    except Exception:  # user code
        return None


def class_for(way: str, name: ClassName | None) -> type | None:
    """Returns the class of an object to be made. Raises RemoteProtocolError if the way cannot make that class."""
    carrier = CARRIERS.get(way)
    if carrier is None or (name is None) != (carrier.fits is None):
        raise RemoteProtocolError(
            f"no object is made as {way!r} {name} here: use one version of dataloaderjob"
        )
    if name is None or carrier.fits is None:
        return None
    cls = user_code.find_class(*name)
    if not carrier.fits(cls):
        raise RemoteProtocolError(f"{user_code.full_name(cls)} cannot be made as {way!r} in this process")
    return cls


def _way(item: Any) -> str:
    cls = type(item)
    way = _WAYS.get(cls)
    if way is not None:
        return way
    if isinstance(item, Enum):
        return "enum"
    if isinstance(item, torch.Tensor):
        return special.way_of_tensor(item)
    if isinstance(item, np.ndarray):
        return special.way_of_array(item)
    if isinstance(item, np.dtype):
        return "numpy.dtype"
    for base in BASES:
        if isinstance(item, base):
            if is_rebuilt_from(cls, base):
                return base.__name__
            raise StaysError("")
    for way in ("PIL.Image", "tokenizers.Encoding", "torch_geometric", "instance"):
        fits = CARRIERS[way].fits
        if fits is not None and fits(cls):
            return way
    raise StaysError("")


# Ways without a class: the way itself determines the class


def _take_zone(zone: zoneinfo.ZoneInfo) -> str:
    if zone.key is None:
        raise StaysError(" without a key")
    return zone.key


def _take_dtype(dtype: np.dtype[Any]) -> Any:
    descr = np.lib.format.dtype_to_descr(dtype)
    if np.lib.format.descr_to_dtype(descr) != dtype:
        raise StaysError(f" {dtype!r}")
    return descr


def _named_in_torch(kind: type) -> Carrier:
    """Carrier of torch.float32 and the like, whose `str` is their path."""

    def make(cls: Any, name: Any) -> Any:  # noqa: ARG001
        found = vars(torch).get(name.removeprefix("torch."))  # getattr might import
        if not isinstance(found, kind):
            raise TypeError(f"{name} is no {kind.__name__}")
        return found

    return Carrier(take=str, make=make)


def _of(take: Callable[[Any], Any], make: Callable[[Any], Any]) -> Carrier:
    return Carrier(take=take, make=lambda cls, content: make(content))  # noqa: ARG005


_VALUES: dict[type, Carrier] = {
    dt.date: _of(lambda d: (d.year, d.month, d.day), lambda c: dt.date(*c)),
    dt.time: _of(
        lambda t: (t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold),
        lambda c: dt.time(*c[:5], fold=c[5]),
    ),
    dt.datetime: _of(
        lambda d: (d.year, d.month, d.day, d.hour, d.minute, d.second, d.microsecond, d.tzinfo, d.fold),
        lambda c: dt.datetime(*c[:8], fold=c[8]),
    ),
    dt.timedelta: _of(lambda d: (d.days, d.seconds, d.microseconds), lambda c: dt.timedelta(*c)),
    dt.timezone: _of(lambda z: z.__getinitargs__(), lambda c: dt.timezone(*c)),
    zoneinfo.ZoneInfo: _of(_take_zone, zoneinfo.ZoneInfo),
    Decimal: _of(str, Decimal),
    Fraction: _of(lambda f: (f.numerator, f.denominator), lambda c: Fraction(*c)),
    uuid.UUID: _of(
        lambda u: (u.int, u.is_safe.value), lambda c: uuid.UUID(int=c[0], is_safe=uuid.SafeUUID(c[1]))
    ),
    pathlib.PosixPath: _of(str, pathlib.PosixPath),
    pathlib.PurePosixPath: _of(str, pathlib.PurePosixPath),
    pathlib.PureWindowsPath: _of(str, pathlib.PureWindowsPath),
    range: _of(lambda r: (r.start, r.stop, r.step), lambda c: range(*c)),
    slice: _of(lambda s: (s.start, s.stop, s.step), lambda c: slice(*c)),
    EllipsisType: _of(no_content, lambda c: ...),  # noqa: ARG005
    array.array: Carrier(
        take=lambda a: (a.typecode, a.tobytes()), make=lambda cls, c: array.array(*c), shared=True  # noqa: ARG005
    ),
    deque: Carrier(take=lambda d: (list(d), d.maxlen), make=lambda cls, c: deque(*c), shared=True),  # noqa: ARG005
    SimpleNamespace: Carrier(
        take=no_content, make=lambda cls, c: SimpleNamespace(), attributes=True, shared=True  # noqa: ARG005
    ),
    torch.device: _of(str, torch.device),
    torch.dtype: _named_in_torch(torch.dtype),
    torch.layout: _named_in_torch(torch.layout),
    torch.memory_format: _named_in_torch(torch.memory_format),
}  # fmt: skip
_WAYS = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in _VALUES}


# Ways with a class


def _take_enum(member: Enum) -> Any:
    # A flag of several bits has no name, or a name that belongs to no member.
    return (None, member.value) if isinstance(member, Flag) else (member.name, None)


def _make_enum(cls: Any, content: Any) -> Any:
    name, value = content
    return cls(value) if issubclass(cls, Flag) else cls.__members__[name]


def _subclass_of(base: Any) -> Carrier:
    """Carrier that makes objects as pickle does, by the built-in type's methods, without the user's `__init__` or
    `__new__`."""
    change = _CHANGES.get(base)
    new: Any = base.__new__

    def make(cls: Any, content: Any) -> Any:
        if type(content) is not base:
            raise TypeError(f"{type(content).__name__} for a {base.__name__}")
        if change is None:
            return new(cls, content)
        made = new(cls)
        change(made, content)
        return made

    def fits(cls: type) -> bool:
        return is_rebuilt_from(cls, base)

    return Carrier(take=_CONTENTS[base], make=make, fits=fits, attributes=True, shared=True)


def _is_plain_class(cls: type) -> bool:
    """True if its objects consist only of their `__dict__`. Not of the standard library: its objects own resources."""
    return (
        is_rebuilt_from(cls, object)
        and "__new__" not in _names(cls)
        and cls.__dictoffset__ != 0
        and not _is_of_standard_library(cls)
    )


def _is_of_standard_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in sys.stdlib_module_names


def _names(cls: type) -> set[str]:
    """Returns the names that the class and its bases define, except `object`."""
    return {name for base in cls.__mro__[:-1] for name in base.__dict__}


def _is_image(cls: type) -> bool:
    """True for PIL's images, whose state is their pixels. False if PIL is not imported: then no image can exist."""
    module = sys.modules.get("PIL.Image")
    return module is not None and issubclass(cls, module.Image) and cls.__module__.startswith("PIL.")


def _is_encoding(cls: type) -> bool:
    """True for encodings that a fast tokenizer of Hugging Face puts in a BatchEncoding; their state is JSON."""
    return cls is getattr(sys.modules.get("tokenizers"), "Encoding", None)


def _make_mapping(cls: Any, content: Any) -> Any:
    if type(content) is not dict:
        raise TypeError(f"{type(content).__name__} for a dict")
    return cls(content)


def _make_of_state(cls: Any, content: Any) -> Any:
    made = cls.__new__(cls)
    made.__setstate__(content)
    return made


CARRIERS: dict[str, Carrier] = {
    **{_WAYS[kind]: carrier for kind, carrier in _VALUES.items()},
    **special.CARRIERS,
    "numpy.dtype": _of(_take_dtype, np.lib.format.descr_to_dtype),
    "enum": Carrier(take=_take_enum, make=_make_enum, fits=lambda cls: issubclass(cls, Enum)),
    **{base.__name__: _subclass_of(base) for base in BASES},
    "PIL.Image": Carrier(
        take=lambda image: image.__getstate__(), make=_make_of_state, fits=_is_image, shared=True
    ),
    "tokenizers.Encoding": Carrier(
        take=lambda encoding: encoding.__getstate__(), make=_make_of_state, fits=_is_encoding, shared=True
    ),
    "torch_geometric": graphs.CARRIER,
    "instance": Carrier(
        take=no_content, make=lambda cls, c: object.__new__(cls), fits=_is_plain_class,  # noqa: ARG005
        attributes=True, shared=True,
    ),
    # Dicts with keys other than plain values; the encoder takes these apart itself.
    "pairs": _of(no_content, lambda c: dict(zip(*c, strict=True))),
    "mapping": Carrier(
        take=no_content, make=_make_mapping, fits=is_made_from_dict, attributes=True
    ),
    "defaultdict": Carrier(take=no_content, make=lambda cls, c: defaultdict(cls, c), fits=lambda cls: True),  # noqa: ARG005
}  # fmt: skip
