"""Objects that are decomposed to be sent: enums, subclasses of built-in types, mappings, images, graphs, instances.

A *way* is the name of a carrier, which decomposes and rebuilds objects. Schemas contain these names, and `CARRIERS`
maps them to carriers. To add a carrier for one exact type, add an entry to `library_values.VALUES`. To add any other
carrier, add an entry to `CARRIERS` and a case to `_way`. `allowed` decides which classes may be rebuilt.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, Flag
from functools import partial
from types import GetSetDescriptorType, MappingProxyType, MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch

from dataloaderjob.batches import allowed, graphs, images, library_values, special
from dataloaderjob.batches.library_values import is_one, value
from dataloaderjob.batches.special import (
    Carrier,
    StaysError,
    attributes_beside,
    exactly,
    is_rebuilt_from,
    no_content,
)
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.layout import ClassName
from dataloaderjob.shipping import user_code

BASES = (str, bytes, bytearray, int, float, complex, list, tuple, set, frozenset, dict)
"""Built-in types whose subclasses are sent as their content and `__dict__`."""
LOCAL = ", a class defined inside a function: define it at the top level of a module"
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
"""Functions that convert an object of a subclass to the built-in type itself. They ignore what the subclass
overrides."""


class Apart(NamedTuple):
    """A decomposed object."""

    way: str
    cls: ClassName | None
    content: Any
    attributes: dict[str, Any]


def take_apart(item: Any) -> Apart:
    """Decomposes `item`. Raises StaysError if that is not possible."""
    way = _way(item)
    carrier, cls = CARRIERS[way], None
    if carrier.fits is not None:
        cls = user_code.class_name(type(item) if carrier.named is None else carrier.named(type(item)))
        if cls is None:
            raise StaysError(LOCAL)
    attributes = attributes_beside(item) if carrier.attributes else {}
    return Apart(way, cls, carrier.take(item), attributes)


def is_dataclass(item: object) -> bool:
    """Returns True if `item` is a dataclass that consists only of its fields. A dataclass that is also a list, for
    example, has further content."""
    return (
        dataclasses.is_dataclass(item)
        and not isinstance(item, (type, Enum, torch.Tensor, np.ndarray))
        and not isinstance(item, BASES)
    )


# Dataclasses and named tuples


@allowed.remembered
def is_namedtuple(cls: type) -> bool:
    """Returns True for named tuples that a batch may carry."""
    return (
        tuple in allowed.mro(cls)
        and type(allowed.static(cls, "_fields")) is tuple
        and allowed.is_allowed_record(cls)
    )


@allowed.remembered
def is_dataclass_of_batches(cls: type) -> bool:
    """Returns True for dataclasses that a batch may carry: those whose objects consist of fields and attributes."""
    bases = allowed.mro(cls)
    return (
        type(allowed.static(cls, "__dataclass_fields__")) is dict
        and allowed.is_allowed_record(cls)
        and allowed.static(cls, "__del__") is None
        and not any(base in bases for base in (*BASES, BaseException, Enum, torch.Tensor, np.ndarray))
    )


def not_fields(cls: type, names: Iterable[str]) -> list[str]:
    """Returns those of `names` that batches do not carry. For a library's dataclass, batches carry only the fields."""
    if allowed.is_allowed(cls):
        return []
    fields = allowed.static(cls, "__dataclass_fields__")
    return [name for name in names if name not in fields]


def fields_putter(cls: type, names: tuple[str, ...]) -> Callable[[Any, list[Any]], Any]:
    """Returns a function that sets the fields of a dataclass object. It calls no `__init__`, `__setattr__` or setter.

    Raises RemoteProtocolError for a name that the class cannot store.
    """
    if more := not_fields(cls, names):
        raise RemoteProtocolError(f"{allowed.full_name(cls)} has no field {more[0]!r} in this process")
    slots = [allowed.static(cls, name) for name in names]
    put = [slot.__set__ if type(slot) is MemberDescriptorType else None for slot in slots]
    if None in put and cls.__dictoffset__ == 0:
        raise RemoteProtocolError(
            f"{allowed.full_name(cls)} has no attributes besides its slots in this process"
        )

    def fill(made: Any, items: list[Any]) -> Any:
        for name, setter, item in zip(names, put, items, strict=True):
            if setter is None:
                own_dict(made)[name] = item
            else:
                setter(made, item)
        return made

    def fill_dict(made: Any, items: list[Any]) -> Any:
        own_dict(made).update(zip(names, items, strict=True))
        return made

    return fill if any(put) else fill_dict


def own_dict(made: Any) -> Any:
    """Returns an object's `__dict__`, or None if it has none. Does not call the class's `__getattribute__`."""
    try:
        return object.__getattribute__(made, "__dict__")
    except AttributeError:
        return None


# Mappings


_STANDARD_MAPPINGS = (dict, OrderedDict, Counter, UserDict, ChainMap, MappingProxyType)
_MADE_EMPTY = frozenset({"addict.addict.Dict", "mmengine.config.config.ConfigDict"})
"""Mappings of libraries whose constructors set attributes. The constructors are called without any content."""


def mapping_maker(cls: Any) -> Callable[[dict[Any, Any]], Any] | None:
    """Returns a function that makes a mapping of this class from a dict, or None if a batch may not carry one.

    Only the standard library's own classes are called with the content. Others are filled without running their code.
    """
    if any(cls is one for one in _STANDARD_MAPPINGS):
        return cls  # type: ignore[no-any-return]
    bases = allowed.mro(cls)
    if dict in bases and defaultdict not in bases:
        base: Any = OrderedDict if OrderedDict in bases else dict
        if not allowed.is_allowed(cls, Counter if Counter in bases else base):
            return None
        make = cls if allowed.full_name(cls) in _MADE_EMPTY else partial(base.__new__, cls)
        return lambda items: _filled(make(), base.__setitem__, items)
    if UserDict in bases and allowed.is_allowed(cls, UserDict):
        return lambda items: _with_data(object.__new__(cls), items)
    return None


def takes_attributes(cls: type) -> bool:
    """Returns True if a mapping of this class may get attributes. The standard library's mappings may not, because they
    keep their content in attributes."""
    return not any(cls is one for one in _STANDARD_MAPPINGS)


def _filled(made: Any, put: Callable[[Any, Any, Any], None], items: Mapping[Any, Any]) -> Any:
    check_names(items)
    for key, item in items.items():
        put(made, key, item)
    return made


def _with_data(made: Any, items: Mapping[Any, Any]) -> Any:
    check_names(items)
    own_dict(made)["data"] = dict(items)
    return made


def check_names(names: Iterable[Any]) -> None:
    """Raises TypeError for a key such as `__array_interface__`, because a mapping may expose its keys as attributes.
    numpy would then read memory at the address given there."""
    for name in names:
        if type(name) is str and name.startswith("__") and name.endswith("__"):
            raise TypeError(f"a mapping cannot have the key {name!r}")


def made_from_dict(cls: Any, items: dict[Any, Any]) -> Any:
    """Returns a mapping of class `cls` with the content `items`, or None if that is not possible."""
    make = mapping_maker(cls)
    if make is None:
        return None
    try:
        made = make(items)
        return made if len(made) == len(items) and isinstance(made, cls) else None
    except Exception:  # user code
        return None


def is_own_dict(item: Any) -> bool:
    """Returns True for a dict that is its own `__dict__`, as after `self.__dict__ = self`."""
    return isinstance(item, dict) and getattr(item, "__dict__", None) is item


def _is_plain_dict(cls: type) -> bool:
    return (
        dict in allowed.mro(cls)
        and OrderedDict not in allowed.mro(cls)
        and is_rebuilt_from(cls, dict)
        and allowed.is_allowed(cls, dict)
        and type(allowed.static(cls, "__dict__")) is GetSetDescriptorType
    )


def _make_own_dict(cls: Any, content: Any) -> Any:
    made = _filled(dict.__new__(cls), dict.__setitem__, is_one(content, dict))
    object.__setattr__(made, "__dict__", made)
    return made


def class_for(way: str, name: ClassName | None) -> type | None:
    """Returns the class that a schema names, or None if `way` needs no class. Raises RemoteProtocolError if `way`
    cannot create objects of the class."""
    carrier = CARRIERS.get(way)
    if carrier is None or (name is None) != (carrier.fits is None):
        raise RemoteProtocolError(
            f"this process cannot create an object by the method {way!r} (class {name}): use the same dataloaderjob "
            "version everywhere"
        )
    if name is None or carrier.fits is None:
        return None
    cls = allowed.find(*name)
    if not carrier.fits(cls):
        raise RemoteProtocolError(f"{allowed.full_name(cls)} cannot be created as {way!r} in this process")
    return cls


def _way(item: Any) -> str:
    cls = type(item)
    way = library_values.WAYS.get(cls)
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
    if is_own_dict(item) and _is_plain_dict(cls):
        return "own dict"
    for base in BASES:
        if isinstance(item, base):
            if why := allowed.why_not(cls, base):
                raise StaysError(why)
            if is_rebuilt_from(cls, base):
                return base.__name__
            raise StaysError("")
    for way in ("PIL.Image", "tokenizers.Encoding", "torch_geometric", "instance"):
        fits = CARRIERS[way].fits
        if fits is not None and fits(cls):
            return way
    raise StaysError("" if cls.__module__ == "builtins" else allowed.why_not(cls))


# Ways with a class


_MAX_FLAG_BITS = 64


def _take_enum(member: Enum) -> Any:
    if not isinstance(member, Flag):
        return member.name, None
    # A flag with several bits has no name, or a name that belongs to no member.
    if type(member.value) is not int or not _is_plain_flag(type(member)):
        raise StaysError(", a flag with a _missing_ of its own")
    return None, member.value


def _is_plain_flag(cls: Any) -> bool:
    return getattr(cls._missing_, "__func__", None) is Flag._missing_.__func__  # type: ignore[attr-defined]


def _make_enum(cls: Any, content: Any) -> Any:
    """Returns an existing member, or a flag with several bits, without running code of the class."""
    name, bits = content
    if name is not None:
        return allowed.static(cls, "_member_map_")[is_one(name, str)]
    number = is_one(bits, int)
    if not issubclass(cls, Flag) or number.bit_length() > _MAX_FLAG_BITS or not _is_plain_flag(cls):
        raise TypeError(f"{cls.__name__} has no member with this value")
    return cls(number)


def _subclass_of(base: Any) -> Carrier:
    """Returns a carrier for subclasses of a built-in type. It creates objects with the built-in type's own methods, and
    never calls the user's `__init__` or `__new__`."""
    change = _CHANGES.get(base)
    new: Any = base.__new__

    def make(cls: Any, content: Any) -> Any:
        if type(content) is not base:
            raise TypeError(f"the content must be a {base.__name__}, but is a {type(content).__name__}")
        if base is dict:
            check_names(content)
        if change is None:
            return new(cls, content)
        made = new(cls)
        change(made, content)
        return made

    def fits(cls: type) -> bool:
        return allowed.is_allowed(cls, base) and is_rebuilt_from(cls, base)

    return Carrier(take=_CONTENTS[base], make=make, fits=fits, attributes=True, shared=True)


@allowed.remembered
def _is_plain_class(cls: type) -> bool:
    """Returns True if objects of the class consist only of their `__dict__`."""
    return (
        allowed.is_allowed(cls)
        and is_rebuilt_from(cls, object)
        and not any("__new__" in base.__dict__ for base in cls.__mro__[:-1])
        and cls.__dictoffset__ != 0
    )


def _is_encoding(cls: type) -> bool:
    """Returns True for the encodings that Hugging Face's fast tokenizers put into a BatchEncoding. Their state is
    JSON."""
    return cls is getattr(sys.modules.get("tokenizers"), "Encoding", None)


def _make_mapping(cls: Any, content: Any) -> Any:
    make = mapping_maker(cls)
    if make is None:
        raise TypeError(f"a {cls.__name__} cannot be created from a dict")
    return make(is_one(content, dict))


def _make_encoding(cls: Any, content: Any) -> Any:
    made = cls.__new__(cls)
    made.__setstate__(is_one(content, bytes))
    return made


def _make_pairs(content: Any) -> dict[Any, Any]:
    keys, items = exactly(content, (list, tuple), list)
    return dict(zip(keys, items, strict=True))


def _make_defaultdict(cls: Any, content: Any) -> Any:
    return defaultdict(cls, is_one(content, dict))


CARRIERS: dict[str, Carrier] = {
    **{library_values.WAYS[kind]: carrier for kind, carrier in library_values.VALUES.items()},
    **special.CARRIERS,
    "numpy.dtype": library_values.DTYPE,
    "enum": Carrier(take=_take_enum, make=_make_enum, fits=lambda cls: issubclass(cls, Enum)),
    **{base.__name__: _subclass_of(base) for base in BASES},
    "own dict": Carrier(take=_CONTENTS[dict], make=_make_own_dict, fits=_is_plain_dict, shared=True),
    "PIL.Image": images.CARRIER,
    "tokenizers.Encoding": Carrier(
        take=lambda encoding: encoding.__getstate__(), make=_make_encoding, fits=_is_encoding, shared=True
    ),
    "torch_geometric": graphs.CARRIER,
    "instance": Carrier(
        take=no_content, make=lambda cls, c: object.__new__(cls), fits=_is_plain_class,  # noqa: ARG005
        attributes=True, shared=True,
    ),
    # Dicts whose keys are not plain values. The encoder itself decomposes them.
    "pairs": value(no_content, _make_pairs),
    "mapping": Carrier(
        take=no_content, make=_make_mapping, fits=lambda cls: mapping_maker(cls) is not None, attributes=True
    ),
    "defaultdict": Carrier(take=no_content, make=_make_defaultdict, fits=allowed.is_factory),
}  # fmt: skip
