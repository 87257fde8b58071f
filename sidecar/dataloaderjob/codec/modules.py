"""User modules in the trainer: which they are, their source, and which function is whose.

A user module is one outside the standard library, installed distributions and this package that has
Python source, or is a namespace package. An editable install lies outside and counts as the user's.
functools.wraps gives a wrapper the name of what it wraps, so a function's code tells where it is from.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import sysconfig
import types
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")
_OURS = frozenset({"dataloaderjob", "dataloaderjob_operator"})
MAINS = frozenset({"__main__", "__mp_main__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A module as shipped."""

    name: str
    file: str | None
    """None for a namespace package."""
    search: list[str] | None
    """`__path__` of a package."""
    text: bytes

    def packed(self) -> tuple[Any, ...]:
        return self.name, self.file, self.search, self.text


def _folders(*names: str) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {path for name in names for path in (paths[name], os.path.realpath(paths[name]))}
    return tuple(sorted(os.path.join(path, "") for path in found))


_OUTSIDE = _folders("stdlib", "platstdlib", "purelib", "platlib")


def is_installed(file: str) -> bool:
    """Whether a file belongs to the standard library or to an installed distribution."""
    return file.startswith(_OUTSIDE) or any(f"{os.sep}{part}{os.sep}" in file for part in _INSTALLED)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in _OURS


class UserModules:
    """The user modules of this process, looked for anew when the list of loaded modules has changed."""

    def __init__(self) -> None:
        self._loaded: list[str] = []
        self._found: dict[str, ModuleType] = {}
        self._sources: dict[str, tuple[Any, Source | None]] = {}
        """Source by module's name, with the spec it was read for. Read once: an editor may be at work meanwhile."""

    def find(self) -> dict[str, ModuleType]:
        """Returns the user modules by name, in the order of their first import."""
        loaded = list(sys.modules)
        if loaded != self._loaded:
            self._found = {
                name: module for name, module in list(sys.modules.items()) if self._source(name, module)
            }
            self._loaded = loaded
        return self._found

    def sources(self) -> list[Source]:
        """Returns the source of each user module, by name."""
        found = (self._source(name, module) for name, module in sorted(self.find().items()))
        return [source for source in found if source is not None]

    def _source(self, name: str, module: Any) -> Source | None:
        # Not getattr: modules that load lazily would load.
        own = getattr(module, "__dict__", None)
        if not isinstance(own, dict) or name in MAINS or own.get("__name__") != name:
            return None
        spec = own.get("__spec__")
        known = self._sources.get(name)
        if known is None or known[0] is not spec:
            known = self._sources[name] = spec, _read(name, own)
        return known[1]


def _read(name: str, own: dict[str, Any]) -> Source | None:
    if is_ours(name):
        return None
    file, search = own.get("__file__"), own.get("__path__")
    folders = [os.path.abspath(path) for path in search] if search is not None else None
    if not isinstance(file, str):
        if not folders or is_installed(os.path.join(folders[0], "")):
            return None
        return Source(name=name, file=None, search=folders, text=b"")
    file = os.path.abspath(file)
    if is_installed(file) or file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)):
        return None
    text = source_text(file, own.get("__loader__"))
    return None if text is None else Source(name=name, file=file, search=folders, text=text)


def source_text(file: str, loader: Any) -> bytes | None:
    """The source in `file`, which may be within an archive that `loader` reads."""
    if not file.endswith((".py", ".pyw")) and loader is not None:
        return None
    try:
        with open(file, "rb") as opened:
            return opened.read()
    except OSError:
        pass
    try:
        return bytes(loader.get_data(file))
    except (OSError, AttributeError):
        return None


def main_source() -> dict[str, Any]:
    """What a fresh `__main__` needs to look like this process's."""
    own = getattr(sys.modules.get("__main__"), "__dict__", {})
    file = own.get("__file__")
    file = os.path.abspath(file) if isinstance(file, str) else None
    spec = own.get("__spec__")
    return {
        "file": file,
        "package": own.get("__package__"),
        "spec": getattr(spec, "name", None),
        "text": (source_text(file, None) if file is not None and not is_installed(file) else None) or b"",
    }


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
