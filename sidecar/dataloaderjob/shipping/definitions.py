"""The definitions in a script that its dataset does not refer to. Feeders load them when code looks them up in
`__main__`.

Some code uses names that an analysis of the dataset's code does not find: `pickle.load` of one of the script's classes,
`globals()[name]`, `typing.get_type_hints`, and a module's `__main__.OPT`. Each definition is sent in a separate pickle,
which refers to other definitions by name and is loaded on demand. Objects that are large or cannot be pickled are left
out. Data is sent only if it is a constant in the source, or if a module looks it up in `__main__`. Most other globals
change between epochs and ranks, and each change would create another bundle.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import io
import re
import sys
import threading
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dataloaderjob.core import values
from dataloaderjob.shipping import names
from dataloaderjob.shipping.modules import MAINS, Source
from dataloaderjob.shipping.pickling import DYNAMIC, Bounded, Reached, UserCodePickler, UserCodeUnpickler

MAX_NBYTES = 1024 * 1024
"""Maximum size, in bytes, of the pickle of a definition."""
_MAIN = "main"
_IMPORTS_MAIN = re.compile(rb"import\s+__main__|from\s+__main__|import_module\(\s*['\"]__main__")
_ATOMS = frozenset({str, int, float, bool, bytes, type(None)})
Entry = tuple[bytes, list[str]]
"""(pickle of a definition, names of the globals that the definition looks up when it is used)."""


class _Pickler(UserCodePickler):
    """A pickler that refers to other globals of `__main__` by name."""

    def __init__(self, root: Any, by_name: Mapping[int, str], known: names.Names, modules: Any) -> None:
        self.out = Bounded(MAX_NBYTES)
        super().__init__(self.out, None, known=known, user_modules=modules)
        self.used: dict[str, None] = {}
        others = self.persistent_id

        def persistent_id(obj: Any) -> Any:
            name = by_name.get(id(obj))
            if name is None or obj is root:
                return others(obj)
            self.used[name] = None
            return _MAIN, name

        self.persistent_id = persistent_id


class Definitions:
    """A pickler of definitions, which reuses the pickle of a definition that cannot have changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[Any, ...], Entry | None]] = {}

    def packed(
        self,
        reached: Reached,
        known: names.Names,
        modules: Collection[str],
        sources: Iterable[Source],
        text: bytes | None,
    ) -> bytes:
        """Returns the script's definitions, packed for `Found`. Omits those in `reached`, which are sent with the
        dataset. Returns b"" if no definition is left."""
        own = vars(sys.modules["__main__"])
        asked = {
            name for source in sources for name in _attributes_of_main(source.text)
        } | reached.hints.keys()
        constants = _literals(text or b"")
        by_name = {
            id(value): name
            for name, value in sorted(own.items(), key=lambda item: str(item[0]), reverse=True)
            if _is_defined(name, value) or (name in reached.main and names.kind(value) != "value")
        }
        pending = [name for name, value in own.items() if _is_defined(name, value)] + [*asked]
        entries: dict[str, Entry] = {}
        seen = set(reached.main)
        while pending:
            name = pending.pop()
            if name in seen or name not in own or (name.startswith("__") and name.endswith("__")):
                continue
            seen.add(name)
            value = own[name]
            if not (isinstance(value, names.CODE) or name in asked or _is_constant(name, value, constants)):
                continue
            entry = self._entry(name, value, by_name, known, modules)
            if entry is not None:
                entries[name] = entry
                pending += entry[1]
        if not entries:
            return b""
        return values.pack((sorted(reached.hints), [(name, *entries[name]) for name in sorted(entries)]))

    def _entry(
        self, name: str, value: Any, by_name: Mapping[int, str], known: names.Names, modules: Collection[str]
    ) -> Entry | None:
        key = _key(value, modules)
        before = self._known.get(name)
        if key and before is not None and _same(before[0], key):
            return before[1]
        entry = _written(name, value, by_name, known, modules)
        if key:
            self._known[name] = key, entry
        return entry


def _is_defined(name: str, value: Any) -> bool:
    """Returns True for a function or a class that the script defines under this name."""
    return (
        isinstance(value, names.CODE)
        and getattr(value, "__module__", None) in MAINS
        and getattr(value, "__qualname__", None) == name
    )


def _is_constant(name: str, value: Any, constants: Mapping[str, Any]) -> bool:
    with contextlib.suppress(Exception):  # user code
        return name in constants and type(value) is type(constants[name]) and bool(value == constants[name])
    return False


def _key(value: Any, modules: Collection[str]) -> tuple[Any, ...]:
    """Returns the objects whose identities determine the pickle of `value`, or an empty tuple if identities alone do
    not determine it."""
    module = getattr(value, "__module__", None)
    if isinstance(value, types.ModuleType):
        return (value,)
    if type(value) is types.FunctionType:
        held = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        if value.__closure__ is None and not vars(value) and all(type(one) in _ATOMS for one in held):
            return value, value.__code__, *held
        return ()
    if isinstance(module, str) and module not in MAINS and module not in modules:
        return (value,)
    return ()


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _written(
    name: str, value: Any, by_name: Mapping[int, str], known: names.Names, modules: Collection[str]
) -> Entry | None:
    pickler = _Pickler(value, by_name, known, modules)
    try:
        pickler.dump(value)
    except Exception:  # any exception of a user's __reduce__
        return None
    finally:
        pickler.close()
    reached = pickler.reached
    needs = {*pickler.used, *reached.main, *reached.hints} - {name}
    return pickler.out.getvalue(), sorted(needs)


@functools.lru_cache(maxsize=1)
def _literals(text: bytes) -> dict[str, Any]:
    """Returns the name and the value of each global that the source sets exactly once, to a literal."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    stored: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            stored[node.id] = stored.get(node.id, 0) + 1
        elif isinstance(node, ast.Global):
            stored |= dict.fromkeys(node.names, 2)
    found = {}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if stored[name] == 1:
                with contextlib.suppress(ValueError, TypeError, MemoryError):
                    found[name] = ast.literal_eval(value)
    # An empty list or dict is probably filled later.
    return {name: value for name, value in found.items() if value not in ([], {})}


@functools.cache
def _attributes_of_main(text: bytes) -> frozenset[str]:
    """Returns the names that a module's source looks up in `__main__`."""
    if not _IMPORTS_MAIN.search(text):
        return frozenset()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return frozenset()
    bound, found = {"__main__"}, set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                bound.update(alias.asname or alias.name for alias in aliases if alias.name == "__main__")
            case ast.ImportFrom(module="__main__", names=aliases):
                found.update(alias.name for alias in aliases)
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(args=[ast.Constant(value="__main__")])
            ):
                bound.add(name)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in bound:
                found.add(attribute)
    return frozenset(found)


# In a feeder


class _Unpickler(UserCodeUnpickler):
    def __init__(self, data: bytes, fresh: names.Fresh, found: Found) -> None:
        super().__init__(io.BytesIO(data), (), fresh)
        self._found = found

    def persistent_load(self, pid: Any) -> Any:
        return self._found.find(pid[1]) if pid[0] == _MAIN else super().persistent_load(pid)


class Found:
    """The definitions of a bundle, each loaded when it is looked up in `__main__`."""

    def __init__(self, packed: bytes, fresh: names.Fresh) -> None:
        eager, entries = values.unpack(packed) if packed else ([], [])
        self._eager: list[str] = list(eager)
        self._entries: dict[str, Entry] = {name: (data, needs) for name, data, needs in entries}
        self._fresh = fresh
        self._own = vars(sys.modules["__main__"])
        self._loading: set[str] = set()
        self._lock = threading.RLock()
        if self._entries:
            self._own["__getattr__"], self._own["__dir__"] = self.find, self._dir

    def find(self, name: str) -> Any:
        """Returns the global `name`. Raises AttributeError if it does not exist or cannot be loaded."""
        with self._lock:
            if name in self._own:
                return self._own[name]
            if name not in self._entries or name in self._loading:
                raise AttributeError(
                    f"module '__main__' has no attribute {name!r}", name=name, obj=sys.modules["__main__"]
                )
            data, needs = self._entries[name]
            self._loading.add(name)
            try:
                value = _Unpickler(data, self._fresh, self).load()
            except Exception as exc:  # user code, or a missing library
                raise AttributeError(f"{name} of the script cannot be loaded: {exc}", name=name) from exc
            finally:
                self._loading.discard(name)
            self._own.setdefault(name, value)
            self._load_all(needs)
            return self._own[name]

    def load_eagerly(self) -> None:
        """Loads the definitions that code looks up directly in the globals dict, which cannot load them on demand."""
        with self._lock:
            self._load_all(self._eager)

    def _load_all(self, wanted: Iterable[str]) -> None:
        for name in [*self._entries] if DYNAMIC in wanted else wanted:
            if name not in self._own and not hasattr(builtins, name):
                with contextlib.suppress(AttributeError):
                    self.find(name)

    def _dir(self) -> list[str]:
        return sorted({*self._own, *self._entries} - {"__getattr__", "__dir__"})
