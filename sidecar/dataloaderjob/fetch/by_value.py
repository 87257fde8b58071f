"""Classes that travel by value: those of the script, and those made within functions.

A class is made empty, then gets its attributes, so that what they hold may refer to it. Making it runs nothing of
the user's: what a metaclass and `__init_subclass__` did in the trainer is in the state that travels. They would
find a `__main__` without its globals, and register each class a second time.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import cloudpickle

from dataloaderjob.fetch.classes import note_sent
from dataloaderjob.fetch.modules import is_installed

_cloudpickle: Any = cloudpickle.cloudpickle
_BY_METACLASS = ("__prepare__", "__new__", "__init__", "__setattr__")
_made: WeakSet[type] = WeakSet()
"""The classes of this process that came by value."""


def reduce_class(cls: Any) -> tuple[Any, ...]:
    """cloudpickle's, without the tracker id, by which it would take a class of another bundle for this one."""
    args: Any
    note_sent(cls)
    if issubclass(cls, enum.Enum):
        members = {member.name: member.value for member in cls}
        args = (cls.__bases__, cls.__name__, cls.__qualname__, members, cls.__module__, None, None)
        return _make_enum, args, _cloudpickle._enum_getstate(cls), None, None, _set_state  # noqa: SLF001
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    args = (type(cls), cls.__name__, _cloudpickle._get_bases(cls), own, None, None)  # noqa: SLF001
    return _make_class, args, _cloudpickle._class_getstate(cls), None, None, _set_state  # noqa: SLF001


# In a feeder


def _make_class(metaclass: type, name: str, bases: tuple[type, ...], *rest: Any) -> type:
    classes = types.resolve_bases(bases)  # Generic[T] is none
    with _quiet([metaclass, *map(type, classes)], classes):
        return _note(_cloudpickle._make_skeleton_class(metaclass, name, bases, *rest))  # noqa: SLF001


def _make_enum(bases: tuple[type, ...], *rest: Any) -> type:
    with _quiet((), bases):
        return _note(_cloudpickle._make_skeleton_enum(bases, *rest))  # noqa: SLF001


def _set_state(cls: type, state: Any) -> type:
    with _quiet([type(cls)], ()):
        made: type = _cloudpickle._class_setstate(cls, state)  # noqa: SLF001
    return made


def _note(cls: type) -> type:
    _made.add(cls)
    return cls


@contextlib.contextmanager
def _quiet(metaclasses: Iterable[type], bases: Iterable[type]) -> Iterator[None]:
    """Takes the hooks of the user's classes away; those of libraries run, for what they register is in no state."""
    hooks = [(cls, name) for cls in _with_bases(metaclasses) for name in _BY_METACLASS]
    hooks += [(cls, "__init_subclass__") for cls in _with_bases(bases)]
    taken = [(cls, name, vars(cls)[name]) for cls, name in hooks if name in vars(cls)]
    for cls, name, _ in taken:
        type.__delattr__(cls, name)
    try:
        yield
    finally:
        for cls, name, hook in taken:
            type.__setattr__(cls, name, hook)


def _with_bases(classes: Iterable[type]) -> list[type]:
    return [
        cls for cls in dict.fromkeys(base for given in classes for base in given.__mro__) if _is_users(cls)
    ]


def _is_users(cls: type) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls in _made or (isinstance(file, str) and not is_installed(file))
