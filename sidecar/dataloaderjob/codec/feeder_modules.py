"""User modules in a feeder: imported under their own names from the shipped source, then given their state."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

from dataloaderjob.codec import module_state
from dataloaderjob.codec.definitions import Found
from dataloaderjob.codec.modules import Source
from dataloaderjob.codec.names import Fresh
from dataloaderjob.codec.pickling import UserCodeUnpickler
from dataloaderjob.core.errors import InputError

SLOW_IMPORT_S = 1.0
"""An import that the dataset did not ask for and that took longer is told."""


class ModuleLoader(importlib.abc.MetaPathFinder):
    """Finds the shipped modules before those of this machine, and gives each its state."""

    def __init__(self, sources: Mapping[str, Source], others: Mapping[str, bytes]) -> None:
        """`others` is the state of modules that get it when they are imported."""
        self.failed: dict[str, InputError] = {}
        """What to raise if a module whose import failed is needed."""
        self._sources = sources
        self._others = dict(others)
        self._fresh = Fresh()
        self._imported: list[str] | None = []
        """Modules that wait for their state until everything is imported; None from then on."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        source = self._sources.get(fullname)
        if source is None:
            return None
        is_package = source.search is not None
        if source.file is None:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=is_package)
        else:
            loader = _Loader(source, self._on_import)
            spec = importlib.machinery.ModuleSpec(fullname, loader, origin=source.file, is_package=is_package)
            spec.has_location = True
        if source.search is not None:
            spec.submodule_search_locations = list(source.search)
        return spec

    def load(self, stream: IO[bytes], buffers: Iterable[Any], imports: Iterable[tuple[str, bool]]) -> Any:
        """Imports the modules (name, whether the dataset needs it), gives them their state, and returns the roots.

        All are imported before any gets its state: what an import adds to another module's tables is in that
        module's state already.
        """
        found = Found(self._others.pop("__main__", b""), self._fresh)
        for name, needed in imports:
            if needed:
                self._import(name)
            else:
                _import_for_effect(name)
        unpickler = UserCodeUnpickler(stream, buffers, self._fresh)
        modules = module_state.apply_code(unpickler.load(), self.failed)
        for name in modules:
            data = unpickler.load()
            if name not in self.failed:
                module_state.apply_data(name, data)
        module_state.assign_all("__main__", unpickler.load())
        imported, self._imported = self._imported or [], None
        for name in imported:
            self._give_state(name)
        roots = unpickler.load()
        found.load_eagerly()
        return roots

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except Exception as exc:  # user code; it matters only if the dataset needs it
            self.failed[name] = import_error(name, self._sources, exc)

    def _on_import(self, name: str) -> None:
        if self._imported is not None:
            self._imported.append(name)
        else:
            self._give_state(name)

    def _give_state(self, name: str) -> None:
        packed = self._others.pop(name, None)
        if packed is None:
            return
        try:
            module_state.apply_alone(name, packed, self._fresh)
        except Exception as exc:  # user code; the module stays as its import made it
            _say(f"the state of the module {name} is not that of the trainer: {exc}")


def _import_for_effect(name: str) -> None:
    began = time.perf_counter()
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # user code, which may end with sys.exit()
        _say(
            f"the import of {name}, which the script imports, too, fails in feeders: {type(exc).__name__}: {exc}"
        )
    elapsed_s = time.perf_counter() - began
    if elapsed_s > SLOW_IMPORT_S:
        _say(
            f"importing {name} took {elapsed_s:.1f} s in a feeder: if samples do not need what it does to other "
            'modules, import it under `if __name__ == "__main__":`'
        )


def _say(text: str) -> None:
    print(f"[dataloaderjob] {text}", file=sys.stderr, flush=True)  # noqa: T201


class _Loader(importlib.machinery.SourceFileLoader):
    """Reads the module's own source from the bundle, other files of a package from disk."""

    def __init__(self, source: Source, on_import: Callable[[str], None]) -> None:
        super().__init__(source.name, source.file or "")
        self._source = source
        self._on_import = on_import

    def get_data(self, path: str) -> bytes:
        return self._source.text if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"{path} is not compared with what is compiled on this machine")

    def exec_module(self, module: types.ModuleType) -> None:
        remember_lines(self.path, self._source.text)
        super().exec_module(module)
        self._on_import(self.name)


def remember_lines(file: str, text: bytes) -> None:
    """Makes tracebacks and `inspect` show the shipped lines, whatever the file here holds."""
    try:
        lines = importlib.util.decode_source(text).splitlines(keepends=True)
    except (SyntaxError, UnicodeDecodeError):
        return
    linecache.cache[file] = len(text), None, lines, file


def make_main(main: Mapping[str, Any]) -> types.ModuleType:
    """Puts a fresh `__main__` into sys.modules: the script's name and file, and nothing in it."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=sys.modules["builtins"], __package__=main["package"])
    if main["file"] is not None:
        module.__file__ = main["file"]
        if main["text"]:
            remember_lines(main["file"], main["text"])
    if main["spec"] is not None:
        module.__spec__ = importlib.machinery.ModuleSpec(main["spec"], None, origin=main["file"])
    sys.modules["__main__"] = module
    return module


def import_error(name: str, shipped: Mapping[str, Source], exc: BaseException) -> InputError:
    source = shipped.get(name)
    where = f" ({source.file})" if source is not None and source.file else ""
    if isinstance(exc, ModuleNotFoundError) and exc.name not in shipped:
        error = missing(exc, f"the module {name!r}{where}")
    else:
        error = InputError(
            f"the dataset needs the module {name!r}{where}, whose import fails in a feeder: "
            f"{type(exc).__name__}: {exc}. It is imported there from the trainer's source, in a process that "
            f"has not run the script: make its top level work without what the script did before"
        )
    error.__cause__ = exc
    return error


def missing(exc: ModuleNotFoundError, who: str) -> InputError:
    return InputError(
        f"{who} needs the module {exc.name!r}, which feeders do not have: install it in the feeders' image "
        "(the trainer's image plus dataloaderjob[feeder])"
    )
