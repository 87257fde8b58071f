"""Classes by name: how a class of the user's code in a feeder is found again in the trainer.

A feeder may hold the user's classes by value (cloudpickle), under the module names that they have in the
trainer. The trainer looks in the modules that it has loaded (`__main__` is among them). It imports no package
because a feeder names it; only a module of a package that it has imported already.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

from dataloaderjob.core.errors import UnsupportedBatch
from dataloaderjob.core.layout import ClassName

_ELSEWHERE: dict[type, ClassName] = {types.MappingProxyType: ("types", "MappingProxyType")}
"""Classes that are not where they say."""


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
        found: Any = sys.modules.get(module) or _import(module)
        for name in qualname.split("."):
            found = getattr(found, name)
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


def _import(module: str) -> types.ModuleType:
    package = module.partition(".")[0]
    if package not in sys.modules:
        raise ImportError(f"{package!r} is not imported here")
    return importlib.import_module(module)
