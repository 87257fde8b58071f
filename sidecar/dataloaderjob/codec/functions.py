"""Functions by value: which globals their code uses, what they keep, and how one is made again.

A module's own functions keep default arguments, attributes, and the one object in a settings' cache.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from dataloaderjob.codec.modules import MAINS, is_users

_cloudpickle: Any = cloudpickle.cloudpickle
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_STATE = (
    "__name__",
    "__qualname__",
    "__annotations__",
    "__kwdefaults__",
    "__defaults__",
    "__module__",
    "__doc__",
)
_codes: dict[int, tuple[types.CodeType, tuple[str, ...]]] = {}
CACHED = "<cached>"
"""Stands for the only result of a function without arguments under functools.lru_cache."""
REGISTRY = "<registry>"
"""Stands for what was registered with a function under functools.singledispatch."""
DEFAULTS = "__defaults__"
_LRU: Any = type(functools.lru_cache(len))


class Globals:
    """Stands for the globals of a module, which functions by value share with it."""

    def __init__(self, name: str) -> None:
        self.name = name


def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a code object uses, and those of the functions in it."""
    known = _codes.get(id(code))
    if known is None:
        found = dict.fromkeys(_cloudpickle._walk_global_ops(code))  # noqa: SLF001
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                found.update(dict.fromkeys(names_in(const)))
        known = _codes[id(code)] = code, tuple(found)
    return known[1]


def names_in_annotations(cls: type) -> dict[str, None]:
    """Names used by a class whose annotations are text, as `from __future__ import annotations` makes them."""
    texts = [text for text in vars(cls).get("__annotations__", {}).values() if type(text) is str]
    return dict.fromkeys(name for text in texts for name in _IDENTIFIER.findall(text))


def _submodules(function: types.FunctionType, own: Mapping[str, Any]) -> list[str]:
    """Modules that a function reaches as attributes of others, as in `import os; os.path`, and so on downwards."""
    found: list[str] = []
    used = function.__code__.co_names
    known = [own[name] for name in names_in(function.__code__) if isinstance(own.get(name), types.ModuleType)]
    pending = [module.__name__ for module in known if "__path__" in vars(module)]
    while pending:
        package = pending.pop()
        inner = [f"{package}.{name}" for name in used if f"{package}.{name}" in sys.modules]
        found += inner
        pending += inner
    return found


def state_of(function: types.FunctionType, own: Mapping[str, Any]) -> tuple[Any, ...]:
    # New strings: interned or not, equal names would be written differently in two processes.
    state = {name: value for name in _STATE if (value := getattr(function, name))}
    extra = {"".join(name): value for name, value in vars(function).items()}
    return state, extra, function.__closure__, _submodules(function, own)


def globals_of(module: str) -> dict[str, Any]:
    return vars(sys.modules[module] if module in MAINS else importlib.import_module(module))


def make(code: Any, own: dict[str, Any], cells: Any) -> types.FunctionType:
    return types.FunctionType(code, own, None, None, cells)


def set_state(function: types.FunctionType, given: tuple[Any, ...]) -> None:
    state, extra, cells, submodules = given
    for name, value in state.items():
        setattr(function, name, value)
    vars(function).update(extra)
    for cell, filled in zip(function.__closure__ or (), cells or (), strict=True):
        try:
            cell.cell_contents = filled.cell_contents
        except ValueError:
            continue  # empty in the trainer, too
    for name in submodules:
        importlib.import_module(name)


class Kept(enum.Enum):
    """Stands for what stays as the import made it."""

    KEPT = "kept"


KEPT = Kept.KEPT


def items_of(path: str, function: Any, can_copy: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yields (path, object) of what `function`, a module's own, keeps."""
    if type(function) is _LRU:
        yield from _cached(path, function)
        return
    if isinstance(function, functools.singledispatchmethod):
        function = function.dispatcher
    if type(function) is not types.FunctionType:
        return
    if "registry" in vars(function) and "_clear_cache" in vars(function):
        registered = [pair for pair in vars(function)["registry"].items() if pair[0] is not object]
        if registered:
            yield f"{path}.{REGISTRY}", tuple(registered)
        return
    for name, value in list(vars(function).items()):
        if name != "__wrapped__":
            yield f"{path}.{name}", value
    if not is_users(function.__globals__):
        return
    if function.__defaults__:
        yield f"{path}.{DEFAULTS}", _copied(function.__defaults__, can_copy)
    if function.__kwdefaults__ and all(
        _travels(value, can_copy) for value in function.__kwdefaults__.values()
    ):
        yield f"{path}.__kwdefaults__", function.__kwdefaults__


def _copied(defaults: tuple[Any, ...], can_copy: Callable[[Any], bool]) -> tuple[Any, ...]:
    copied = tuple(value if _travels(value, can_copy) else KEPT for value in defaults)
    return copied if KEPT in map(_mark, copied) else defaults  # the same object each time


def _mark(value: Any) -> Any:
    return value if value is KEPT else None  # arrays do not compare


def _travels(value: Any, can_copy: Callable[[Any], bool]) -> bool:
    """Whether a default argument travels: a library's object may be a mark, known by its identity."""
    return can_copy(value) or is_users(getattr(sys.modules.get(type(value).__module__), "__dict__", {}))


def _cached(path: str, cached: Any) -> Iterator[tuple[str, Any]]:
    function = cached.__wrapped__
    if type(function) is not types.FunctionType or not is_users(function.__globals__):
        return
    if cached.cache_info().currsize == 1 and _takes_nothing(function.__code__):
        yield f"{path}.{CACHED}", cached()


def _takes_nothing(code: types.CodeType) -> bool:
    takes_any = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return not (code.co_argcount or code.co_kwonlyargcount or takes_any)


# In a feeder


def assign(function: Any, name: str, value: Any) -> bool:
    """Gives a function of a fresh import one thing that the trainer's keeps. Returns whether it was one of these."""
    if name == DEFAULTS:
        fresh = function.__defaults__ or ()
        if KEPT not in map(_mark, value) or len(fresh) == len(value):
            both = zip(value, (*fresh, *value[len(fresh) :]), strict=False)
            function.__defaults__ = tuple(own if given is KEPT else given for given, own in both)
    elif name == CACHED:
        _prime(function, value)
    elif name == REGISTRY:
        for cls, made in value:
            function.register(cls, made)
    else:
        return False
    return True


def _given(result: Any = None) -> Any:
    return result


def _prime(cached: Any, result: Any) -> None:
    """Makes `result` what an lru_cache holds: nothing but a call of its function fills it."""
    function = getattr(cached, "__wrapped__", None)
    if type(cached) is not _LRU or type(function) is not types.FunctionType or function.__closure__:
        return
    code, defaults = function.__code__, function.__defaults__
    cached.cache_clear()
    function.__code__, function.__defaults__ = _given.__code__, (result,)
    try:
        cached()
    finally:
        function.__code__, function.__defaults__ = code, defaults
