"""Classes by name: how a class of the user's code in a feeder is found again in the trainer.

A feeder may hold the user's classes by value (cloudpickle), under the module names that they have in the
trainer. The trainer looks in the modules that it has loaded (`__main__` is among them), then among the classes that
it sent by value. It imports no package because a feeder names it; only a module of a package that it has imported
already.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any
from weakref import WeakValueDictionary

from dataloaderjob.core.errors import UnsupportedBatch
from dataloaderjob.core.layout import ClassName

_ELSEWHERE: dict[type, ClassName] = {types.MappingProxyType: ("types", "MappingProxyType")}
"""Classes that are not where they say."""
_sent: WeakValueDictionary[ClassName, type] = WeakValueDictionary()
"""Named tuples that went to feeders by value: one made in a function or a class has the name of a module's."""
_ambiguous: set[ClassName] = set()
"""Names that several of them had, with other fields."""


def note_sent(cls: Any) -> None:
    """Notes a class that feeders get by value."""
    if not hasattr(cls, "_fields"):
        return
    name = cls.__module__, cls.__qualname__
    known: Any = _sent.setdefault(name, cls)
    if known._fields != cls._fields:
        _ambiguous.add(name)


def name_of(cls: type) -> ClassName | None:
    """Returns (module, qualified name), or None for a class made inside a function: nobody finds it."""
    if cls in _ELSEWHERE:
        return _ELSEWHERE[cls]
    if "<locals>" in cls.__qualname__:
        return None
    return cls.__module__, cls.__qualname__


def full_name(cls: type) -> str:
    """For messages: `PIL.Image.Image`, but `dict`."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def resolve(module: str, qualname: str) -> type:
    """Finds a class. Raises UnsupportedBatch saying how to make it findable."""
    try:
        found: Any = _found(module, qualname)
    except (ImportError, AttributeError, ValueError) as exc:
        raise UnsupportedBatch(
            f"the batch holds a {module}.{qualname}, and this process cannot find that class ({exc}): "
            "define it at the top level of a module that the training script imports"
        ) from exc
    if not isinstance(found, type):
        raise UnsupportedBatch(
            f"the batch holds a {module}.{qualname}, which is no class in this process but a "
            f"{type(found).__name__}: give the class a name of its own"
        )
    return found


def _found(module: str, qualname: str) -> Any:
    """Raises ImportError, AttributeError, ValueError."""
    try:
        found: Any = sys.modules.get(module) or _import(module)
        for name in qualname.split("."):
            found = getattr(found, name)
        return found
    except AttributeError:
        sent = None if (module, qualname) in _ambiguous else _sent.get((module, qualname))
        if sent is None:
            raise
        return sent


def _import(module: str) -> types.ModuleType:
    package = module.partition(".")[0]
    if package not in sys.modules:
        raise ImportError(f"{package!r} is not imported here")
    return importlib.import_module(module)
