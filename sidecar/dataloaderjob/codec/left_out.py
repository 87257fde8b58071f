"""What of a module's state cannot be copied, as narrowly as can be told: it stays as the import makes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from dataloaderjob.codec.classes import full_name
from dataloaderjob.codec.functions import KEPT

ENTRY = "[]"
"""Ends the path of what is left out of an object that travels otherwise."""
Excluded = set[tuple[str, str, int]]
"""(module, path, id): what was found not to pickle."""
_MOST = 64
"""An object with more entries that cannot be copied is left out whole."""
_MADE_ANEW = frozenset(
    {
        "_asyncio",
        "_contextvars",
        "_queue",
        "_thread",
        "_weakref",
        "asyncio",
        "concurrent",
        "contextvars",
        "logging",
    }
    | {"queue", "threading", "weakref"}
)
"""Packages of objects that nobody expects in another process."""


def find(path: str, value: Any, pickled: Any, can_copy: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Returns (path, object) of what does not pickle in a part of a module's state: some entries, or all of it."""
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
    """Returns a content in which KEPT stands for what is left out. Raises TypeError where an object's own
    __setstate__ would meet it."""

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
    """Says, once for each name, that feeders have not the trainer's."""
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
        f"{what} cannot be copied, so feeders have there what the import of {module} makes. If the dataset needs "
        "it, make it at the top of that module or in worker_init_fn",
        stacklevel=2,
    )


# In a feeder


def filled(pairs: Any, old: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The pairs of a dictionary, in which the fresh object's own stand for what was left out."""
    for key, value in pairs:
        if value is not KEPT:
            yield key, value
        elif key in old:
            yield key, old[key]


def members_of(members: list[Any], old: list[Any]) -> list[Any]:
    found = [old[i] if value is KEPT and i < len(old) else value for i, value in enumerate(members)]
    return [value for value in found if value is not KEPT]
