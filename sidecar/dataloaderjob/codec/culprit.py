"""Finds the part of an object that cannot be pickled, for a message that names it."""

from __future__ import annotations

import contextlib
import functools
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dataloaderjob.codec.classes import full_name
from dataloaderjob.codec.modules import MAINS
from dataloaderjob.codec.names import Names
from dataloaderjob.codec.pickling import why_not
from dataloaderjob.codec.reducers import is_shared_memory

_SEARCH_S = 5.0
"""A list of a million samples is searched no longer than this; the message then names the list."""
Part = tuple[str, Any]
"""(path, object)."""
_MAX_PATH = 240
_OWN = frozenset({"__dict__", "__weakref__", "__builtins__"})
"""Attributes of a class or a module that lead back to it, or that no pickle holds."""


def find(roots: Mapping[str, Any], known: Names | None = None, user_modules: Collection[str] = ()) -> str:
    """Returns `path: type (why)` of the innermost thing that does not pickle, as in
    `dataset.lock: _thread.lock (TypeError: cannot pickle '_thread.lock' object)`."""
    with _silently():
        return _find(roots, known, user_modules)


def _find(roots: Mapping[str, Any], known: Names | None, user_modules: Collection[str]) -> str:
    deadline = time.monotonic() + _SEARCH_S
    seen: set[int] = set()

    def why(part: Any) -> BaseException | None:
        return why_not(part, known, user_modules)

    parts: Iterable[Part] = roots.items()
    found: tuple[str, Any, BaseException] | None = None
    while (failing := _first_failing(parts, seen, deadline, why)) is not None:
        found = failing
        parts = () if is_shared_memory(found[1]) else _parts(found[0], found[1])
    if found is None:
        return " and ".join(roots)
    path, leaf, error = found
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        reason = "linked too deeply for pickle: keep such objects in a list, and link them by index"
    return f"{_cut(path)}: {full_name(type(leaf))} ({reason})"


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """Looking at attributes provokes what libraries say of deprecated ones; a script may have made that an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _cut(path: str) -> str:
    if len(path) <= _MAX_PATH:
        return path
    return f"{path[: _MAX_PATH // 2]} ... {path[-_MAX_PATH // 2 :]}"


def _first_failing(
    parts: Iterable[Part], seen: set[int], deadline: float, why: Callable[[Any], BaseException | None]
) -> tuple[str, Any, BaseException] | None:
    for path, part in parts:
        if time.monotonic() > deadline:
            return None
        if id(part) not in seen:
            error = why(part)
            if error is not None:
                seen.add(id(part))
                return path, part, error
    return None


def _parts(path: str, whole: Any) -> Iterator[Part]:
    """What an object's pickle consists of, nearest first."""
    if isinstance(whole, types.FunctionType):
        yield from _function_parts(path, whole)
    elif isinstance(whole, types.MethodType):
        yield from ((f"{path}.__self__", whole.__self__), (f"{path}.__func__", whole.__func__))
    elif isinstance(whole, functools.partial):
        yield from (
            (f"{path}.func", whole.func), (f"{path}.args", whole.args), (f"{path}.keywords", whole.keywords)
        )  # fmt: skip
    elif isinstance(whole, type | types.ModuleType):
        yield from ((f"{path}.{name}", part) for name, part in list(vars(whole).items()) if name not in _OWN)
    elif isinstance(whole, staticmethod | classmethod):
        yield path, whole.__func__
    elif isinstance(whole, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in whole.items())
        yield from ((f"{path}: the key {key!r}", key) for key in whole)
    elif isinstance(whole, list | tuple | set | frozenset):
        yield from ((f"{path}[{i}]", part) for i, part in enumerate(whole))
    else:
        yield from _object_parts(path, whole)


def _function_parts(path: str, function: types.FunctionType) -> Iterator[Part]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}: its variable {name}", cell.cell_contents
        except ValueError:
            continue  # empty yet
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield f"{path}: the global {name}", function.__globals__[name]
    for i, default in enumerate(function.__defaults__ or ()):
        yield f"{path}: its default argument {i}", default
    yield from (
        (f"{path}: its default {name}", part) for name, part in (function.__kwdefaults__ or {}).items()
    )


def _names(code: types.CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return [*code.co_names, *inner]


def _object_parts(path: str, whole: Any) -> Iterator[Part]:
    try:
        state = whole.__getstate__()
    except Exception:  # user code; that it fails is what is reported then
        return
    slots: Any = {}
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state, slots = state
    for own in (state, slots):
        if isinstance(own, dict):
            yield from ((f"{path}.{name}", part) for name, part in own.items())
    yield f"{path}: its class", type(whole)


def find_storage(
    roots: Mapping[str, Any], addresses: Collection[int], user_modules: Collection[str] = ()
) -> tuple[str, str]:
    """Returns what, and the path, of the first tensor or array whose memory is at one of `addresses`."""
    deadline = time.monotonic() + _SEARCH_S
    pending = deque(roots.items())
    seen: set[int] = set()
    with _silently():
        while pending and time.monotonic() < deadline:
            path, part = pending.popleft()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, torch.Tensor):
                if part.untyped_storage().data_ptr() in addresses:
                    return "a tensor", _cut(path)
            elif isinstance(part, np.ndarray):
                if part.__array_interface__["data"][0] in addresses:
                    return "an array", _cut(path)
            elif not isinstance(part, str | bytes | int | float | type) and _is_users(part, user_modules):
                pending.extend(_parts(path, part))
    return "something", "the dataset"


def _is_users(part: Any, user_modules: Collection[str]) -> bool:
    """Whether it is worth looking into: not a module of a library, nor its functions."""
    if isinstance(part, types.ModuleType):
        name: Any = part.__name__
    elif isinstance(part, types.FunctionType):
        name = part.__globals__.get("__name__")
    else:
        return True
    return name in MAINS or name in user_modules
