"""The search for user objects that cannot be pickled. They are named in a message, or left out of a module's state.

As little as possible is left out. In feeders, objects that were left out remain as the import creates them.
"""

from __future__ import annotations

import functools
import sys
import time
import types
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from dataloaderjob.shipping.modules import MAINS, MOCK, is_mock
from dataloaderjob.shipping.names import KEPT, Names
from dataloaderjob.shipping.pickling import why_not
from dataloaderjob.shipping.reducers import is_shared_memory
from dataloaderjob.shipping.user_code import full_name

_SEARCH_S = 5.0
"""Time limit of a search, in seconds. If the search through a long list takes longer, the message names only the
list."""
NamedPart = tuple[str, Any]
"""(path, object)."""
_MAX_DEPTH = 100
_MAX_PATH = 240
_OWN = frozenset({"__dict__", "__weakref__", "__builtins__"})
"""Attributes that refer back to their class or module, or that no pickle contains."""
ENTRY = "[]"
"""Suffix of the path of an entry that is left out while the rest of the object is sent."""
Excluded = set[tuple[str, str, int]]
"""The objects that cannot be pickled, as (module, path, id)."""
_MOST = 64
"""Maximum number of entries that are left out individually. An object with more entries that must be left out is itself
left out."""
_MADE_ANEW = frozenset({
    "_asyncio", "_contextvars", "_queue", "_thread", "_weakref", "asyncio", "concurrent", "contextvars", "logging",
    "queue", "threading", "weakref",
})  # fmt: skip
"""Packages with objects that no one expects to find in another process. Their objects are left out without a
warning."""


def describe(roots: Mapping[str, Any], known: Names | None = None, user_modules: Collection[str] = ()) -> str:
    """Returns `path: type (why). Remedy` for the innermost object that cannot be pickled, as in
    `dataset.lock: _thread.lock (TypeError: cannot pickle '_thread.lock' object). Make it in worker_init_fn ...`."""
    search = _Search(functools.partial(why_not, known=known, user_modules=user_modules))
    # Reading attributes may trigger deprecation warnings of libraries, which a script may have turned into errors.
    with warnings.catch_warnings(action="ignore"):
        found = search.innermost(roots.items())
    if found is None:
        return f"{' and '.join(roots)}. {_MAKE}"
    path, leaf, error = found
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        reason = "linked too deeply for pickle: keep such objects in a list, and refer to them by index"
    return f"{_cut(path)}: {full_name(type(leaf))} ({reason}). {_remedy(leaf)}"


_Failing = tuple[str, Any, BaseException]


class _Search:
    """A search for the object that cannot be pickled, and for the reason. It takes at most _SEARCH_S."""

    def __init__(self, why: Callable[[Any], BaseException | None]) -> None:
        self._why = why
        self._deadline = time.monotonic() + _SEARCH_S
        self._seen: set[int] = set()

    def innermost(self, parts: Iterable[NamedPart], depth: int = 0) -> _Failing | None:
        """Returns the innermost object that fails, within the first part that fails. Prefers a part that contains the
        reason, because a function or class may also fail because of an object that other functions refer to."""
        vague = None
        for found in self._failing(parts):
            path, part, _ = found
            if is_shared_memory(part) or _is_test_case(part) or depth >= _MAX_DEPTH:
                return found
            inner = self.innermost(_parts(path, part), depth + 1)
            if inner is not None or not isinstance(part, types.FunctionType | type):
                return inner or found
            vague = vague or found
        return vague

    def _failing(self, parts: Iterable[NamedPart]) -> Iterator[_Failing]:
        for path, part in parts:
            if time.monotonic() > self._deadline:
                return
            if id(part) not in self._seen:
                error = self._why(part)
                if error is not None:
                    self._seen.add(id(part))
                    yield path, part, error


_MAKE = "Create it in worker_init_fn or when __getitem__ first needs it, or drop it in __getstate__"
_STAYS = "with num_workers=0, this process makes the batches"


def _is_test_case(part: Any) -> bool:
    """Returns True for a unittest.TestCase, which holds the state of an entire test run."""
    unittest = sys.modules.get("unittest")
    return unittest is not None and isinstance(part, unittest.TestCase)


def _remedy(leaf: Any) -> str:
    if is_mock(leaf):
        return f"{MOCK}; {_STAYS}"
    if _is_test_case(leaf):
        return (
            "A method of a TestCase carries the whole state of the test run with it: use a function; "
            f"{_STAYS}"
        )
    if isinstance(leaf, _BaseDataLoaderIter):
        return f"A dataset with its own loader, such as torchio's Queue, cannot leave the loader's process: {_STAYS}"
    return _MAKE


def _cut(path: str) -> str:
    if len(path) <= _MAX_PATH:
        return path
    return f"{path[: _MAX_PATH // 2]} ... {path[-_MAX_PATH // 2 :]}"


def _first_failing(
    parts: Iterable[NamedPart], seen: set[int], deadline: float, why: Callable[[Any], BaseException | None]
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


def _parts(path: str, whole: Any) -> Iterator[NamedPart]:
    """Yields the objects that the pickle of `whole` contains, nearest first, each with its path."""
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


def _function_parts(path: str, function: types.FunctionType) -> Iterator[NamedPart]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}: its variable {name}", cell.cell_contents
        except ValueError:
            continue  # the cell is still empty
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


def _object_parts(path: str, whole: Any) -> Iterator[NamedPart]:
    try:
        state = whole.__getstate__()
    except Exception:  # user code; the failure itself is reported instead
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
    """Returns the kind and the path of the first tensor or array with memory at one of `addresses`."""
    deadline = time.monotonic() + _SEARCH_S
    pending = deque(roots.items())
    seen: set[int] = set()
    with warnings.catch_warnings(action="ignore"):
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
    """Returns True if the object must be searched. Returns False for a library's modules and functions."""
    if isinstance(part, types.ModuleType):
        name: Any = part.__name__
    elif isinstance(part, types.FunctionType):
        name = part.__globals__.get("__name__")
    else:
        return True
    return name in MAINS or name in user_modules


# Parts left out of a module's state


def failing_parts(
    path: str, value: Any, pickled: Any, can_copy: Callable[[Any], bool]
) -> list[tuple[str, Any]]:
    """Returns (path, object) for everything that must be left out of a part of a module's state: single entries, or the
    whole part."""
    if can_copy(pickled):
        return []
    if pickled is value:
        return [(path, value)]
    failing = _failing(list(_entries(pickled)), can_copy)
    return [(path + ENTRY, entry) for entry in failing] or [(path, value)]


def _entries(content: tuple[Any, ...]) -> Iterator[Any]:
    match content:
        case "dict", pairs, _:
            yield from (value for _, value in pairs)
        case "local", own:
            yield from own.values()
        case (("set" | "list"), members):
            yield from members
        case _, state, items, pairs:
            for own in _states(state):
                yield from own.values()
            yield from items or ()
            yield from (value for _, value in pairs or ())


def _states(state: Any) -> list[dict[str, Any]]:
    both = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return [own for own in both if isinstance(own, dict)]


def _failing(entries: list[Any], can_copy: Callable[[Any], bool]) -> list[Any]:
    found: list[Any] = []
    pending = [entries]
    while pending and len(found) <= _MOST:
        some = pending.pop()
        if can_copy(some):
            continue
        if len(some) == 1:
            found.append(some[0])
        else:
            pending += [some[: len(some) // 2], some[len(some) // 2 :]]
    return found if len(found) <= _MOST else []


def without(content: tuple[Any, ...], is_out: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Returns the content with KEPT in place of entries that are left out. Raises TypeError if the content has an
    unknown form."""

    def kept(value: Any) -> Any:
        return KEPT if is_out(value) else value

    def state_of(state: Any) -> Any:
        if isinstance(state, tuple) and len(state) == 2:
            return state_of(state[0]), state_of(state[1])
        return {name: kept(value) for name, value in state.items()} if isinstance(state, dict) else state

    match content:
        case "dict", pairs, factory:
            return "dict", [(key, kept(value)) for key, value in pairs], factory
        case "local", own:
            return "local", state_of(own)
        case "set", members:
            return "set", {member for member in members if not is_out(member)}
        case "list", members:
            return "list", [kept(member) for member in members]
        case what, state, items, pairs:
            items = None if items is None else [kept(member) for member in items]
            pairs = None if pairs is None else [(key, kept(value)) for key, value in pairs]
            return what, state_of(state), items, pairs
    raise TypeError(content)


def warn(module: str, path: str, value: Any, warned: set[str]) -> None:
    """Warns, once for each name, that feeders do not have the trainer's object."""
    name = f"{module}.{path.removesuffix(ENTRY)}"
    if name in warned or type(value).__module__.partition(".")[0] in _MADE_ANEW:
        return
    warned.add(name)
    what = (
        f"a {full_name(type(value))} in {name}"
        if path.endswith(ENTRY)
        else f"{name}, a {full_name(type(value))},"
    )
    warnings.warn(
        f"{what} cannot be copied, so feeders use the one that importing {module} creates. If the dataset "
        "needs it, create it at the top of that module or in worker_init_fn",
        stacklevel=2,
    )
