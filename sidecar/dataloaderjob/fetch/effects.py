"""User modules that a script imports for what their import does: registers a codec, patches a library.

Nothing of the dataset refers to such a module, so nothing that is pickled tells of it, and yet samples rely on it.
A feeder imports it if the script would import it again in a worker of the start method "spawn", that is,
at its top level, outside `if __name__ == "__main__":`, by itself or through other user modules; and if its top level
does more than define names: calls a function, changes what it imported, or decorates with what registers.
So a model's file, which only defines classes and imports what is large, is left alone.

Left out are modules whose import is not over in the trainer: one of them may be where the loader is iterated.
What prints, warns, logs or changes sys does not count: it travels otherwise, or nobody misses it in a feeder.
An import that fails there is told and left: what needs the module later imports it again, and gets the error.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from dataloaderjob.fetch.modules import Source

_NO_EFFECT = frozenset({"sys", "logging", "warnings", *vars(builtins)} - {"setattr", "exec"})
_REGISTERS = re.compile(r"regist", re.IGNORECASE)
_known: dict[str, tuple[bytes, bool, tuple[str, ...]]] = {}
"""Source, whether it has an effect, and what it imports, by module."""


def modules(main: Mapping[str, Any], loaded: Mapping[str, ModuleType], sources: Sequence[Source]) -> set[str]:
    """Returns the names of such modules among `loaded`, the user modules of this process."""
    shipped = {source.name: source for source in sources}
    package = main["package"] or ""
    pending = [*_look("__main__", main["text"], package)[1], package]
    if not main["text"]:  # a notebook
        own = vars(sys.modules["__main__"])
        pending += [value.__name__ for value in list(own.values()) if isinstance(value, ModuleType)]
    seen, found = set[str](), set[str]()
    while pending:
        name = pending.pop()
        source = shipped.get(name)
        if name in seen or source is None:
            continue
        seen.add(name)
        has_effect, imported = _look(
            name, source.text, name if source.search is not None else name.rpartition(".")[0]
        )
        pending += imported
        if has_effect and not _being_imported(loaded.get(name)):
            found.add(name)
    return found


def _being_imported(module: Any) -> bool:
    return module is None or getattr(getattr(module, "__spec__", None), "_initializing", False)


def _look(name: str, text: bytes, package: str) -> tuple[bool, tuple[str, ...]]:
    """Returns whether a module's top level has an effect, and the modules that it may import."""
    known = _known.get(name)
    if known is None or known[0] != text:
        known = _known[name] = text, *_looked(text, package)
    return known[1:]


def _looked(text: bytes, package: str) -> tuple[bool, tuple[str, ...]]:
    try:
        statements = list(_top_level(ast.parse(text).body))
    except (SyntaxError, ValueError, RecursionError):
        return False, ()
    imported = dict.fromkeys(name for statement in statements for name in _imports(statement, package))
    foreign = {name for statement in statements for name in _binds(statement)} - _NO_EFFECT
    return any(_has_effect(statement, foreign) for statement in statements), tuple(imported)


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that an import of the module may run."""
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
        base = statement.module or ""
        if statement.level:
            above = package.split(".")[: len(package.split(".")) - statement.level + 1]
            base = ".".join(filter(None, (*above, base)))
        yield from _with_packages(base)
        for alias in statement.names:
            yield f"{base}.{alias.name}"


def _with_packages(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _binds(statement: ast.stmt) -> Iterator[str]:
    """The names that an import statement defines."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]


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
    """The name at the start of `name.attribute[item](...)`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
