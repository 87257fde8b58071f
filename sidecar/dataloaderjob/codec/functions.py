"""Functions and classes by value: which globals their code uses, and how a function is made again."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

import cloudpickle

from dataloaderjob.codec.modules import MAINS

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
    """Of a class whose annotations are text, as `from __future__ import annotations` makes them."""
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
