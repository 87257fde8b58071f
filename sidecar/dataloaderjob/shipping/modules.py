"""The user modules in the trainer, their source, and the origin of functions.

A user module has Python source or is a namespace package. It does not belong to the standard library, to an installed
distribution or to this package. A module of an editable install is a user module. A function's origin is determined
from its code, because functools.wraps gives a wrapper the name of another function.

A script imports some modules only for a side effect, such as registering a codec or patching a library. No pickle
refers to such a module, but samples rely on the side effect. A feeder imports the module under two conditions:

1. The script imports it at the top level, outside `if __name__ == "__main__":`, directly or through other user modules.
   A worker with the start method "spawn" would import it, too.
2. Its top level does more than define names: it calls a function, changes an imported object, or uses a decorator that
   registers something.

A module is left out while the trainer is still importing it, because that import may be iterating over the loader. A
module is also left out if it, or a module that it imports, deletes files or starts programs, tracked runs or process
groups. Output, warnings, logging and changes to sys do not count as side effects: they are sent separately, or feeders
do not need them. An import that fails in a feeder is reported and ignored.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.machinery
import os
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

_INSTALLED = ("site-packages", "dist-packages")
_OURS = frozenset({"dataloaderjob", "dataloaderjob_operator"})
MAINS = frozenset({"__main__", "__mp_main__"})
_NO_EFFECT = frozenset({"sys", "logging", "warnings", *vars(builtins)} - {"setattr", "exec"})
_REGISTERS = re.compile(r"regist", re.IGNORECASE)
_ONCE = re.compile(
    r"(?:shutil|subprocess|os\.(?:remove|unlink|rmdir|removedirs|rename|replace|system|kill\w*)|"
    r"torch\.distributed\.init\w*|(?:torch\.)?multiprocessing\.(?:Process|Pool|Manager|spawn)|deepspeed|horovod|ray|dask|"
    r"wandb|mlflow|neptune|comet_ml|clearml|aim|swanlab)\."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A user module in the form in which it is shipped."""

    name: str
    file: str | None
    """The path of the module's file; None for a namespace package."""
    search: list[str] | None
    """The `__path__` of a package; None for other modules."""
    text: bytes

    def packed(self) -> tuple[Any, ...]:
        return self.name, self.file, self.search, self.text


def _folders(*names: str) -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {path for name in names for path in (paths[name], os.path.realpath(paths[name]))}
    return tuple(sorted(os.path.join(path, "") for path in found))


_OUTSIDE = _folders("stdlib", "platstdlib", "purelib", "platlib")


def is_installed(file: str) -> bool:
    """Returns True if a file belongs to the standard library or to an installed distribution."""
    return file.startswith(_OUTSIDE) or any(f"{os.sep}{part}{os.sep}" in file for part in _INSTALLED)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in _OURS


class UserModules:
    """The user modules of this process. They are searched for again if the list of loaded modules has changed."""

    def __init__(self) -> None:
        self._loaded: list[str] = []
        self._found: dict[str, ModuleType] = {}
        self._sources: dict[str, tuple[Any, Source | None]] = {}
        """Each module's spec and source, by name. A source is read only once, because the file may be edited later."""

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
        """Returns the source of each user module, sorted by name."""
        found = (self._source(name, module) for name, module in sorted(self.find().items()))
        return [source for source in found if source is not None]

    def _source(self, name: str, module: Any) -> Source | None:
        # Does not use getattr, which would load lazy modules.
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
    """Returns the source in `file`, which may be inside an archive that `loader` can read."""
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
    """Returns everything that a fresh `__main__` needs in order to look like this process's `__main__`."""
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


MOCK = "A mock cannot leave its process: patch with new= and a function"


def is_mock(part: Any) -> bool:
    """Returns True for an object of unittest.mock, or for a function that wraps a mock (`autospec`)."""
    mock = sys.modules.get("unittest.mock")
    if mock is None:
        return False
    stands_for = vars(part).get("mock") if type(part) is types.FunctionType else part
    return (
        issubclass(type(stands_for), mock.NonCallableMock) or type(stands_for).__module__ == "unittest.mock"
    )


def is_defined_at(function: Any, module: str, path: str) -> bool:
    """Returns True if a fresh import of `module` would create this function at `path`, judging by the function's code.
    Also returns True for anything but a user's function, because feeders' own imports create library objects."""
    if type(function) is not types.FunctionType:
        return True
    if is_mock(function):
        return False
    code, own = function.__code__, function.__globals__
    if own is getattr(sys.modules.get(module), "__dict__", None):
        # A dataclass generates methods, and the code of such a method has another name.
        is_generated = code.co_filename.startswith("<")
        return code.co_qualname == path or is_generated or not is_users(own)
    return not is_users(own)


def is_users(own: dict[str, Any]) -> bool:
    """Returns True if `own` holds the globals of the script or of a user module."""
    name = own.get("__name__")
    if not isinstance(name, str) or getattr(sys.modules.get(name), "__dict__", None) is not own:
        return False
    if name in MAINS:
        return True
    file = own.get("__file__")
    return isinstance(file, str) and not is_ours(name) and not is_installed(file)


class _Look(NamedTuple):
    """The result of analyzing a module's top level for side effects."""

    has_effect: bool
    is_once: bool
    """True if the top level starts or deletes something, which must not happen a second time."""
    imported: tuple[str, ...]


def modules_with_effects(main: Mapping[str, Any], sources: Sequence[Source]) -> set[str]:
    """Returns the names of the user modules, among those in `sources`, that the script imports for a side effect."""
    shipped = {source.name: source for source in sources}
    package = main["package"] or ""
    pending = [*_look(main["text"], package).imported, package]
    if not main["text"]:  # a notebook, which has no source file
        own = vars(sys.modules["__main__"])
        pending += [value.__name__ for value in list(own.values()) if isinstance(value, ModuleType)]
    looks = _all_looks(pending, shipped)
    found = {name for name, look in looks.items() if look.has_effect}
    return {name for name in found if not any(look.is_once for look in _all_looks([name], shipped).values())}


def _all_looks(names: Sequence[str], shipped: Mapping[str, Source]) -> dict[str, _Look]:
    """Analyzes the modules in `names` and all shipped modules that they import. Returns the results by name."""
    pending, found = list(names), dict[str, _Look]()
    while pending:
        name = pending.pop()
        source = shipped.get(name)
        if source is not None and name not in found:
            package = name if source.search is not None else name.rpartition(".")[0]
            found[name] = _look(source.text, package)
            pending += [*found[name].imported, *_with_packages(name)]
    return found


def is_over(module: ModuleType) -> bool:
    """Returns True if the import of a module has finished."""
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


@functools.lru_cache(maxsize=1024)
def _look(text: bytes, package: str) -> _Look:
    statements = _statements(text)
    imported = dict.fromkeys(name for statement in statements for name in _imports(statement, package))
    foreign = {name: full for statement in statements for name, full in _binds(statement)}
    has_effect = any(_has_effect(statement, foreign.keys() - _NO_EFFECT) for statement in statements)
    is_once = any(_is_once(statement, foreign) for statement in statements)
    return _Look(has_effect, is_once, tuple(imported))


def origins(text: str, name: str, package: str) -> set[str]:
    """Returns the modules from which the source of a module in `package` may import the global `name`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the library's own escape sequences
        statements = _statements(text)
    return {
        _origin(statement, package)
        for statement in statements
        if isinstance(statement, ast.ImportFrom)
        and any(alias.name == "*" or (alias.asname or alias.name) == name for alias in statement.names)
    }


def _origin(statement: ast.ImportFrom, package: str) -> str:
    """Returns the name of the module from which the statement imports."""
    base = statement.module or ""
    if not statement.level:
        return base
    above = package.split(".")[: len(package.split(".")) - statement.level + 1]
    return ".".join(filter(None, (*above, base)))


def _statements(text: str | bytes) -> list[ast.stmt]:
    """Returns the statements that an import of this source may run, or none if it cannot be parsed."""
    try:
        return list(_top_level(ast.parse(text).body))
    except (SyntaxError, ValueError, RecursionError):
        return []


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that an import of the module may run."""
    for statement in body:
        if isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test):
            yield from _top_level(statement.orelse)
            continue
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from _top_level(getattr(statement, part, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _top_level(handler.body)


def _imports(statement: ast.stmt, package: str) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield from _with_packages(alias.name)
    elif isinstance(statement, ast.ImportFrom):
        base = _origin(statement, package)
        yield from _with_packages(base)
        for alias in statement.names:
            yield f"{base}.{alias.name}"


def _with_packages(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _binds(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yields (name, full name) for each name that an import statement defines."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            top = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (top, top)
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name, f"{statement.module}.{alias.name}"


def _is_once(statement: ast.stmt, foreign: Mapping[str, str]) -> bool:
    """Returns True if a simple statement calls a function that matches `_ONCE`."""
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
        return False
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            name, _, rest = ast.unparse(node.func).partition(".")
            if _ONCE.match(f"{foreign.get(name, '')}.{rest}."):
                return True
    return False


def _has_effect(statement: ast.stmt, foreign: set[str]) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Name):
            return function.id not in _NO_EFFECT
        return _root(function) in foreign
    if isinstance(statement, ast.Assign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(not isinstance(target, ast.Name) and _root(target) in foreign for target in targets)
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return any(_REGISTERS.search(ast.unparse(decorator)) for decorator in statement.decorator_list)
    return False


def _root(node: ast.expr) -> str:
    """Returns the name at the start of `name.attribute[item](...)`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
