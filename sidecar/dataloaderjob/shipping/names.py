"""The names of user modules' objects, and the content of these objects.

A pickle refers to a module's global, or to an attribute of one of its classes, by name. A feeder then updates the
object that its own import of the module created. Objects that a module's own functions keep also have names: default
arguments, attributes of functions, and the single result in the cache of a function without arguments.
"""

from __future__ import annotations

import contextlib
import copyreg
import enum
import functools
import inspect
import logging
import pathlib
import random
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from types import ModuleType
from typing import Any

import numpy as np
import torch

from dataloaderjob.core.errors import InputError
from dataloaderjob.shipping.modules import MAINS, MOCK, is_defined_at, is_users

LRU: Any = type(functools.lru_cache(len))
Name = tuple[str, str, str, type | None]
"""(module, dotted path, name of the object's type, the type itself). The last item is None if no import can find the
type."""
Item = tuple[str, Any]
"""(dotted path, object)."""
CODE = (types.FunctionType, type, ModuleType, types.BuiltinFunctionType, LRU)
"""Types of code. A fresh import creates objects of these types, unless user code has replaced them."""
_BY_VALUE = (
    int, float, complex, str, bytes, tuple, frozenset, enum.Enum, BaseException, np.ndarray, np.generic, torch.Tensor,
    torch.UntypedStorage, torch.dtype, torch.device, logging.Logger, re.Pattern, random.Random, pathlib.PurePath,
    date, time, Decimal, weakref.ref, types.CodeType, *CODE,
)  # fmt: skip
_DICTS = (dict, OrderedDict, defaultdict)
_EXACT = frozenset({dict, list, set, OrderedDict, defaultdict, deque, bytearray})
_MAX_NESTING = 4
_CACHED = "<cached>"
"""The last step of the path to the only result in the `functools.lru_cache` of a function without arguments."""
_REGISTRY = "<registry>"
"""The last step of the path to the functions that are registered with a `functools.singledispatch` function."""
_DEFAULTS = "__defaults__"


class Kept(enum.Enum):
    """Placeholder for an object that remains as the import created it."""

    KEPT = "kept"


KEPT = Kept.KEPT


def _globals_of(module: ModuleType) -> Iterator[Item]:
    """Yields the globals of a user module, except dunder names and submodules."""
    for name, value in list(vars(module).items()):
        is_submodule = isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}"
        if not is_submodule and not (name.startswith("__") and name.endswith("__")):
            yield name, value


def _split(module: ModuleType) -> tuple[list[Item], list[Item]]:
    """Returns the code and the data of a module and of its classes, as two lists of items. Code that the module itself
    defines is left out."""
    code: list[Item] = []
    data: list[Item] = []
    for name, value in _globals_of(module):
        if isinstance(value, CODE):
            if not is_own(value, module.__name__, name):
                code.append((name, value))
            elif isinstance(value, type):
                _split_class(name, value, module.__name__, code, data, 1)
            else:
                data.extend(_kept_by(name, value))
        else:
            data.append((name, value))
    return code, data


def is_own(value: Any, module: str, path: str) -> bool:
    """Returns True if the module's source defines this object at `path`."""
    named = getattr(value, "__module__", None) == module and getattr(value, "__qualname__", None) == path
    return named and is_defined_at(value, module, path)


def _split_class(path: str, cls: type, module: str, code: list[Item], data: list[Item], depth: int) -> None:
    if issubclass(cls, enum.Enum) or depth > _MAX_NESTING:
        return
    for name, value in list(vars(cls).items()):
        where = f"{path}.{name}"
        if isinstance(value, staticmethod | classmethod):
            if not _is_own_method(value.__func__, module, where):
                code.append((where, value))
            else:
                bound = f"{where}.__func__" if isinstance(value, classmethod) else where
                data.extend(_kept_by(bound, value.__func__))
        elif isinstance(value, property):
            accessors = [made for made in (value.fget, value.fset, value.fdel) if made is not None]
            if not all(_is_own_method(made, module, where) for made in accessors):
                code.append((where, value))
        elif isinstance(value, types.FunctionType | functools.singledispatchmethod):
            if not _is_own_method(value, module, where):
                code.append((where, value))
            else:
                data.extend(_kept_by(where, value))
        elif isinstance(value, type):
            if is_own(value, module, where):
                _split_class(where, value, module, code, data, depth + 1)
            elif not name.startswith("__"):
                code.append((where, value))
        elif type(value) is functools.partialmethod or not (
            name.startswith(("__", "_abc_")) or hasattr(type(value), "__get__")
        ):
            data.append((where, value))


def _is_own_method(function: Any, module: str, path: str) -> bool:
    return getattr(function, "__qualname__", path) == path and is_defined_at(function, module, path)


# Objects that a module's own functions keep


def _kept_by(path: str, function: Any) -> Iterator[Item]:
    """Yields (path, object) for each object that `function` keeps. The function must be one of the module's own
    functions."""
    if type(function) is LRU:
        yield from _cached(path, function)
        return
    if isinstance(function, functools.singledispatchmethod):
        function = function.dispatcher
    if type(function) is not types.FunctionType:
        return
    if "registry" in vars(function) and "_clear_cache" in vars(function):
        registered = [pair for pair in vars(function)["registry"].items() if pair[0] is not object]
        if registered:
            yield f"{path}.{_REGISTRY}", tuple(registered)
        return
    for name, value in list(vars(function).items()):
        if name != "__wrapped__":
            yield f"{path}.{name}", value
    if not is_users(function.__globals__):
        return
    if function.__defaults__:
        yield f"{path}.{_DEFAULTS}", _copied(function.__defaults__)
    if function.__kwdefaults__ and all(_travels(value) for value in function.__kwdefaults__.values()):
        yield f"{path}.__kwdefaults__", function.__kwdefaults__


def _copied(defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    copied = tuple(value if _travels(value) else KEPT for value in defaults)
    return copied if _has_kept(copied) else defaults  # the same object on each call


def _has_kept(values: tuple[Any, ...]) -> bool:
    return any(value is KEPT for value in values)  # `in` would compare arrays, which raises


def _travels(value: Any) -> bool:
    """Returns True if a default argument is sent. A library's object is not sent, because it may be a sentinel that is
    compared by identity."""
    return _is_plain(value) or is_users(getattr(sys.modules.get(type(value).__module__), "__dict__", {}))


def _cached(path: str, cached: Any) -> Iterator[Item]:
    function = cached.__wrapped__
    if type(function) is not types.FunctionType or not is_users(function.__globals__):
        return
    if cached.cache_info().currsize == 1 and _takes_nothing(function.__code__):
        yield f"{path}.{_CACHED}", cached()


def _takes_nothing(code: types.CodeType) -> bool:
    takes_any = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return not (code.co_argcount or code.co_kwonlyargcount or takes_any)


# Content, updated in place


def kind(value: Any) -> str:
    """Returns the way to update an object in place: "exact" (built-in containers) or "instance". Returns "value" if the
    object cannot be updated, and "opaque" if only an attempt to pickle the object shows whether it can be sent."""
    cls = type(value)
    if cls in _EXACT:
        return "exact"
    if isinstance(value, _BY_VALUE) or value is None:
        return "value"
    if not _reduces(cls):
        return "instance"
    return "exact" if isinstance(value, _DICTS) else "opaque"


def _is_plain(value: Any) -> bool:
    return kind(value) in ("value", "exact")


def delegates(cls: Any) -> bool:
    """Returns True if objects of a class delegate missing attributes to another object. Unpickling such an object looks
    up `__setstate__` before the other object exists, so `__getattr__` then recurses endlessly."""
    is_own = isinstance(getattr(cls, "__getattr__", None), types.FunctionType)
    return is_own and not hasattr(cls, "__setstate__") and not _reduces(cls)


def _reduces(cls: Any) -> bool:
    return (
        cls.__reduce_ex__ is not object.__reduce_ex__
        or cls.__reduce__ is not object.__reduce__
        or cls in copyreg.dispatch_table
        or hasattr(cls, "__getnewargs__")
        or hasattr(cls, "__getnewargs_ex__")
    )


def content(value: Any) -> tuple[Any, ...]:
    """Returns the content that `update` needs to make a fresh object equal to this one. Raises TypeError if the object
    is created in a special way, and any error of its `__getstate__`."""
    if kind(value) == "exact":
        if isinstance(value, dict):
            factory = value.default_factory if isinstance(value, defaultdict) else None
            return "dict", list(value.items()), factory
        if isinstance(value, set):
            return "set", set(value)
        return "list", list(value)
    if isinstance(value, threading.local):
        return "local", dict(vars(value))  # the attributes of this thread; a feeder has only one thread
    make, args, *rest = value.__reduce_ex__(4)
    if make is not copyreg.__newobj__ or len(args) != 1:  # type: ignore[attr-defined]
        raise TypeError(f"a {type(value).__qualname__} is made by {make}")
    state, items, pairs = (*rest, None, None, None)[:3]
    return "object", state, None if items is None else list(items), None if pairs is None else list(pairs)


def update(fresh: Any, what: tuple[Any, ...]) -> None:
    """Gives `fresh` the content of the trainer's object."""
    match what:
        case "dict", pairs, factory:
            _refill_dict(fresh, pairs)
            if factory is not None:
                fresh.default_factory = factory
        case "set", members:
            fresh.clear()
            fresh.update(members)
        case "list", members:
            _refill_list(fresh, members)
        case "local", own:
            set_state(fresh, own)
        case _, state, items, pairs:
            set_state(fresh, state)
            if items is not None:
                _refill_list(fresh, items)
            if pairs is not None:
                _refill_dict(fresh, pairs)


def _refill_list(fresh: Any, members: list[Any]) -> None:
    old = list(fresh)
    found = [old[i] if value is KEPT and i < len(old) else value for i, value in enumerate(members)]
    fresh.clear()
    fresh.extend([value for value in found if value is not KEPT])


def _refill_dict(fresh: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    base: Any = OrderedDict if isinstance(fresh, OrderedDict) else dict
    pairs = list(_filled(pairs, dict(base.items(fresh))))
    base.clear(fresh)
    # Calls dict's own method, because configuration classes may reject new keys, or all changes once they are frozen.
    for key, value in pairs:
        base.__setitem__(fresh, key, value)


def _filled(pairs: Any, old: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields the pairs of a dictionary, with the fresh object's own values in place of those that were left out."""
    for key, value in pairs:
        if value is not KEPT:
            yield key, value
        elif key in old:
            yield key, old[key]


def set_state(fresh: Any, state: Any) -> None:
    # Does not call hasattr on the object, because a user's __getattr__ may need attributes that do not exist yet.
    if hasattr(type(fresh), "__setstate__"):
        fresh.__setstate__(state)
        return
    slots: Any = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    own = getattr(fresh, "__dict__", None)
    if own is not None:
        given = dict(_filled((state or {}).items(), dict(own)))
        own.clear()
        own.update(given)
    for name, value in (slots or {}).items():
        if value is not KEPT:
            object.__setattr__(fresh, name, value)


class Names:
    """The names of the objects of `modules`, looked up by the objects' identity."""

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self.table: dict[int, tuple[Any, Name]] = {}
        """(object, its name) by the object's id. The object is kept alive so that no other object gets the same id."""
        self.split: dict[str, tuple[list[Item], list[Item]]] = {}
        self.wrappers: dict[int, tuple[Any, bool]] = {}
        """(wrapper that has another function's name, True if the wrapper can be sent by value) by the wrapper's id."""
        for module_name, module in modules.items():
            self.split[module_name] = _split(module)
            for path, value in self.split[module_name][1]:
                if not isinstance(value, _BY_VALUE) and value is not None and not path.endswith(_CACHED):
                    self._add(module_name, path, value)

    def _add(self, module: str, path: str, value: Any) -> None:
        known = self.table.get(id(value))
        # The module that defines an object's class most likely created the object.
        if known is None or (type(value).__module__ == module != known[1][0]):
            cls = type(value)
            found = look_up(cls.__module__, cls.__qualname__) is cls or cls.__module__ in MAINS
            self.table[id(value)] = value, (module, path, _type_name(cls), cls if found else None)


class Fresh:
    """The objects that a feeder's own imports have created, by their names in the trainer."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Any] = {}
        self._claimed: dict[int, Any] = {}

    def find(self, module: str, path: str, type_name: str, cls: Any) -> Any:
        """Returns the object with this name, or a new object if the import has not created one of this type."""
        if (module, path) not in self._found:
            self._found[module, path] = self._claim(module, path, type_name, cls)
        return self._found[module, path]

    def _claim(self, module: str, path: str, type_name: str, cls: Any) -> Any:
        found = look_up(module, path)
        if _type_name(type(found)) != type_name or id(found) in self._claimed:
            try:
                found = cls() if cls in _EXACT else cls.__new__(cls)
            except (TypeError, AttributeError) as exc:
                is_mocked = type_name.startswith("unittest.mock.")
                remedy = (
                    f". {MOCK}, or use num_workers=0"
                    if is_mocked
                    else ": create it at the top of that module, or in worker_init_fn"
                )
                raise InputError(
                    f"the dataset needs {module}.{path}, a {type_name}, which can neither be copied nor be "
                    f"created by importing that module in a feeder{remedy}"
                ) from exc
        self._claimed[id(found)] = found
        return found


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def look_up(module: str, path: str) -> Any:
    """Returns the object with this name, or None if it does not exist."""
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def assign(module: str, path: str, value: Any) -> None:
    """Sets a global of a module, or an attribute of one of its classes, unless it already has this value."""
    owner_path, _, last = path.rpartition(".")
    owner = look_up(module, owner_path) if owner_path else sys.modules.get(module)
    if owner is None or vars(owner).get(last) is value:
        return
    # A metaclass may forbid the change. The value from the import then remains.
    with contextlib.suppress(AttributeError, TypeError):
        if not _assign_kept(owner, last, value):
            setattr(owner, last, value)


def _assign_kept(function: Any, name: str, value: Any) -> bool:
    """Gives a freshly imported function an object that the trainer's function keeps, such as its default arguments.
    Returns False if `name` does not denote such an object."""
    if name == _DEFAULTS:
        fresh = function.__defaults__ or ()
        if not _has_kept(value) or len(fresh) == len(value):
            both = zip(value, (*fresh, *value[len(fresh) :]), strict=False)
            function.__defaults__ = tuple(own if given is KEPT else given for given, own in both)
    elif name == _CACHED:
        _prime(function, value)
    elif name == _REGISTRY:
        for cls, made in value:
            function.register(cls, made)
    else:
        return False
    return True


def _given(result: Any = None) -> Any:
    return result


def _prime(cached: Any, result: Any) -> None:
    """Puts `result` into an lru_cache. The only way is to call the cached function, so its code is replaced
    temporarily."""
    function = getattr(cached, "__wrapped__", None)
    if type(cached) is not LRU or type(function) is not types.FunctionType or function.__closure__:
        return
    code, defaults = function.__code__, function.__defaults__
    cached.cache_clear()
    function.__code__, function.__defaults__ = _given.__code__, (result,)
    try:
        cached()
    finally:
        function.__code__, function.__defaults__ = code, defaults
