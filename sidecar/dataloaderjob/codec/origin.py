"""Where a function's code is from: functools.wraps gives a wrapper the name of what it wraps."""

from __future__ import annotations

import sys
import types
from typing import Any

from dataloaderjob.codec.modules import MAINS, is_installed, is_ours


def is_defined_at(function: Any, module: str, path: str) -> bool:
    """Whether a fresh import of `module` makes this very function at `path`, judged by its code. All but functions
    of users count as made so: a library's wrapper is made by the library, or by the import of what it wraps."""
    if type(function) is not types.FunctionType:
        return True
    code, own = function.__code__, function.__globals__
    if own is getattr(sys.modules.get(module), "__dict__", None):
        # Generated code, as a dataclass's, has a name of its own.
        return code.co_qualname == path or is_generated(function) or not is_users(own)
    return not is_users(own)


def is_generated(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith("<")


def is_users(own: dict[str, Any]) -> bool:
    """Whether these are the globals of the script or of a user module."""
    name = own.get("__name__")
    if not isinstance(name, str) or getattr(sys.modules.get(name), "__dict__", None) is not own:
        return False
    if name in MAINS:
        return True
    file = own.get("__file__")
    return isinstance(file, str) and not is_ours(name) and not is_installed(file)
