"""What a kind of object needs to travel taken apart: how its content is got at, and how it is made again.

The tables are in `objects` and `special`. A class goes by its name and is of the kind that its carrier makes, or is
refused: a feeder is not trusted with code, so neither a pickle nor an `__init__` or `__setstate__` of the user's runs.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataloaderjob.core import values

_REDUCED_BY = (
    "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__",
)  # fmt: skip
_MAX_COMPARED_DEPTH = 50


class StaysError(Exception):
    """An object cannot travel taken apart. The text goes behind its class: " of mode X"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """One way to travel."""

    take: Callable[[Any], Any]
    """The content of an object: a batch tree, which may hold tensors. Raises StaysError."""
    make: Callable[[Any, Any], Any]
    """The object, of its class (None where the way alone says it) and its content. Raises on other content."""
    fits: Callable[[type], bool] | None = None
    """Whether a class may be made in this way. None: no class is named."""
    attributes: bool = False
    """What is in `__dict__` travels, too."""
    shared: bool = False
    """Two places in a batch that have the same object have the same one on arrival."""


def no_content(item: object) -> None:
    """`take` for what is made of its attributes alone."""


def is_rebuilt_from(cls: type, base: type) -> bool:
    """Whether `base`'s content and `__dict__` are all that there is to objects of `cls`: pickle, too, takes no more."""
    return (
        cls is not base
        and issubclass(cls, base)
        and all(getattr(cls, name, None) is getattr(base, name, None) for name in _REDUCED_BY)
        and cls not in copyreg.dispatch_table
        and not any(c.__dict__.get("__slots__") for c in cls.__mro__)
        and not hasattr(cls, "__del__")
    )


def attributes_beside(item: Any, made: Any = None) -> dict[str, Any]:
    """What `item` has in `__dict__` and `made`, which was made of its content alone, has not.

    Raises StaysError for what cannot be set again, so that nothing is lost in silence.
    """
    own = getattr(item, "__dict__", None)
    slots = () if made is None else _slots(type(item))
    if own is item or not (own or slots):
        return {}
    basis = {} if made is None else getattr(made, "__dict__", {})
    found = {n: v for n, v in (own or {}).items() if n not in basis or not _same(v, basis[n])}
    found.pop("__orig_class__", None)  # typing's, of Generic[T]
    for name in found:
        if type(name) is not str or name.startswith("__"):
            raise StaysError(f" with an attribute {name!r}")
    for name in slots:
        if not _same(getattr(item, name, None), getattr(made, name, None)):
            raise StaysError(f" with {name!r} in __slots__")
    return found


def _slots(cls: type) -> list[str]:
    found: list[str] = []
    for c in cls.__mro__:
        slots = c.__dict__.get("__slots__", ())
        names = [slots] if isinstance(slots, str) else list(slots)
        found += [f"_{c.__name__.lstrip('_')}{n}" if n.startswith("__") else n for n in names]
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _same(a: Any, b: Any, depth: int = 0) -> bool:
    """Whether two attributes have the same in them. In doubt not: then it travels, or is refused."""
    if a is b:
        return True
    if type(a) is not type(b) or depth > _MAX_COMPARED_DEPTH:
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key], depth + 1) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, depth + 1) for x, y in zip(a, b, strict=True))
    return type(a) in values.SCALARS and bool(a == b)
