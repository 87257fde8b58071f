"""Bundles, in which user code and data are shipped to feeders.

The dataset, collate_fn and worker_init_fn become a bundle of blobs.

`blobs[0]` holds the length of a table as a u64, the table, and the pickle. `module_state` describes the parts of the
pickle. `blobs[1]` is the source of the user's modules. The other blobs are the pickle's buffers; small buffers share a
blob. Feeders map the blobs privately: the node holds them in memory only once, but each feeder may write to its own
view. A feeder imports the user's modules from the shipped source, under their own names, and then restores their state.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import linecache
import os
import struct
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from dataloaderjob.core import values
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.errors import InputError, RemoteProtocolError, say
from dataloaderjob.core.memory import size_text
from dataloaderjob.shipping import module_state, process_state
from dataloaderjob.shipping.definitions import Found
from dataloaderjob.shipping.facts import facts
from dataloaderjob.shipping.modules import Source
from dataloaderjob.shipping.names import Fresh
from dataloaderjob.shipping.pickling import UserCodeUnpickler
from dataloaderjob.shipping.reducers import bytes_of
from dataloaderjob.shipping.snapshot import CodeSnapshot, SnapshotMaker

BLOB_NBYTES = 64 * 1024 * 1024
"""Maximum size, in bytes, of a blob that several buffers share. If no buffers shared a blob, a dataset of 10,000 arrays
would become 10,000 files."""
ALIGNMENT = 64
ANNOUNCED_NBYTES = 1_000_000_000
"""Minimum number of bytes at which copying is announced, because it takes seconds."""
SLOW_S = 1.0
SLOW_IMPORT_S = 1.0
"""Minimum duration in seconds at which an import that the dataset does not need is reported."""
FIRST_BUFFER = 2
"""Index of the first blob that contains buffers."""
_LENGTH = struct.Struct("<Q")
BufferPlace = tuple[int, int, int]
"""The place of a buffer: (index of the blob, offset in the blob, number of bytes)."""
_snapshots = SnapshotMaker()
_one_at_a_time = threading.RLock()
"""Protects `_snapshots`, because several threads may create iterators at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """The loaded content of a bundle."""

    dataset: Any
    collate_fn: Callable[[Any], Any] | None
    worker_init_fn: Callable[[int], None] | None


def make_bundle(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None,
    worker_init_fn: Callable[[int], None] | None,
    *,
    store: BlobStore,
    allow_pickle: bool,
    slow: Callable[[float], None] | None = None,
) -> Bundle:
    """Pickles the current state of the dataset and its functions into `store`, and returns the bundle. The bundle's id
    depends on the content.

    `slow`: called with the duration in seconds if this call takes more than SLOW_S and the next one will be as slow.
    Raises InputError, which names the attribute, if an attribute cannot be pickled.
    """
    roots = {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
    with _one_at_a_time:
        blobs = _snapshots.unchanged(roots, store)
        if blobs is None:
            began = time.perf_counter()
            snapshot = _snapshots.take(roots)
            blobs = _stored(snapshot, store)
            elapsed_s = time.perf_counter() - began
            if not _snapshots.remember(roots, snapshot, blobs, elapsed_s) and elapsed_s > SLOW_S and slow:
                slow(elapsed_s)
    return Bundle(blobs=blobs, allow_pickle=allow_pickle, facts=facts())


def _after_fork_in_child() -> None:
    global _one_at_a_time  # another thread may have held the lock during the fork
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _stored(snapshot: CodeSnapshot, store: BlobStore) -> tuple[tuple[str, int], ...]:
    places: list[BufferPlace] = []
    groups = list(_groups(snapshot.buffers))
    total = sum(_padded(buffer.nbytes) for buffer in snapshot.buffers)
    store.check_room(total)
    if total >= ANNOUNCED_NBYTES:
        say(f"copying {size_text(total)} of the dataset for the feeders, once")
    for blob, group in enumerate(groups, start=FIRST_BUFFER):
        offset = 0
        for buffer in group:
            places.append((blob, offset, buffer.nbytes))
            offset += _padded(buffer.nbytes)
    table = values.pack((places, snapshot.process, snapshot.imports, snapshot.others))
    head = b"".join((_LENGTH.pack(len(table)), table, snapshot.pickled))
    own = [[memoryview(head)], [memoryview(snapshot.sources)]]
    made = [partial(_joined, group) for group in (*own, *groups)]
    return tuple(store.put_all(made) if len(groups) > 1 else [store.put(make()) for make in made])


def _groups(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yields groups of adjacent buffers, with at most BLOB_NBYTES per group. A larger buffer forms its own group."""
    group: list[memoryview] = []
    nbytes = 0
    for buffer in buffers:
        if group and nbytes + buffer.nbytes > BLOB_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(buffer)
        nbytes += _padded(buffer.nbytes)
    if group:
        yield group


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _joined(group: list[memoryview]) -> bytes | memoryview:
    if len(group) == 1:
        return group[0]
    return b"".join(part for b in group for part in (b, bytes(_padded(b.nbytes) - b.nbytes)))


# In a feeder


def load_bundle(bundle: Bundle, store: BlobStore) -> UserCode:
    """Loads a bundle from `make_bundle`, and the trainer's state, into this process. Every blob must be in `store`.
    Call this only once, in a process that has not loaded any user code.

    Arrays and tensors of 64 KiB and more are views of the blobs. They are writable, and writes are private to this
    process. Raises InputError, which names the module, if a module that the user's code needs is missing on this
    machine.
    """
    if len(bundle.blobs) < FIRST_BUFFER:
        raise RemoteProtocolError(
            f"a bundle must have at least {FIRST_BUFFER} blobs, but has {len(bundle.blobs)}"
        )
    head = store.path(bundle.blobs[0][0]).read_bytes()
    places, process, imports, others, start = _parse_head(head)
    main, sources = _parse_sources(store.path(bundle.blobs[1][0]).read_bytes())
    maps = [_map(store.path(digest), nbytes) for digest, nbytes in bundle.blobs[FIRST_BUFFER:]]
    try:
        buffers = [_part(maps[blob - FIRST_BUFFER], offset, nbytes) for blob, offset, nbytes in places]
    except (IndexError, TypeError, ValueError) as exc:
        raise RemoteProtocolError(f"a bundle's table of buffers is malformed: {exc}") from exc
    process_state.apply(process)
    _make_main(main)
    modules = ModuleLoader(sources, others)
    sys.meta_path.insert(0, modules)
    stream = io.BytesIO(head)
    stream.seek(start)
    try:
        dataset, collate_fn, worker_init_fn = modules.load(stream, buffers, imports)
    except Exception as exc:
        error = _explained(exc, modules)
        if error is None:
            raise
        raise error from exc
    return UserCode(dataset=dataset, collate_fn=collate_fn, worker_init_fn=worker_init_fn)


def _parse_head(
    head: bytes,
) -> tuple[list[BufferPlace], bytes, list[tuple[str, bool]], dict[str, bytes], int]:
    if len(head) < _LENGTH.size:
        raise RemoteProtocolError(
            f"a bundle's first blob must have at least {_LENGTH.size} bytes, but has {len(head)}"
        )
    start = _LENGTH.size + _LENGTH.unpack_from(head)[0]
    match values.unpack(head[_LENGTH.size : start]):
        case (list() as places, bytes() as process, list() as imports, dict() as others):
            return places, process, imports, others, start
    raise RemoteProtocolError("a bundle's first blob holds no table of buffers")


def _parse_sources(data: bytes) -> tuple[Mapping[str, Any], dict[str, Source]]:
    match values.unpack(data):
        case (dict() as main, list() as packed):
            sources = (Source(name=n, file=f, search=s, text=t) for n, f, s, t in packed)
            return main, {source.name: source for source in sources}
    raise RemoteProtocolError("a bundle's second blob holds no modules")


def _map(path: Path, nbytes: int) -> memoryview:
    """Maps the file privately. Uses torch's mapping, which, unlike `mmap`, does not keep a file descriptor open."""
    storage: Any = torch.UntypedStorage.from_file(str(path), False, nbytes)
    return bytes_of(storage).data


def _part(mapped: memoryview, offset: int, nbytes: int) -> memoryview:
    if not 0 <= offset <= offset + nbytes <= mapped.nbytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} are outside a blob of {mapped.nbytes} bytes")
    return mapped[offset : offset + nbytes]


class ModuleLoader(importlib.abc.MetaPathFinder):
    """A finder of the shipped modules, which take precedence over this machine's modules. It restores each module's
    state."""

    def __init__(self, sources: Mapping[str, Source], others: Mapping[str, bytes]) -> None:
        """`others`: the states of modules that the dataset does not reach. They are restored only when the modules are
        imported."""
        self.failed: dict[str, InputError] = {}
        """The errors of failed imports, by module. An error is raised only if its module is needed."""
        self._sources = sources
        self._others = dict(others)
        self._fresh = Fresh()
        self._imported: list[str] | None = []
        """Imported modules whose states are yet to be restored; None once all modules are imported."""

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
        """Imports the modules, restores their states, and returns the roots. `imports` has (name, True if the dataset
        needs the module) for each module.

        All modules are imported before any state is restored. The import of one module may add entries to another
        module's tables, and the restored state already includes these entries.
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
        except Exception as exc:  # user code; the error matters only if the dataset needs the module
            self.failed[name] = _import_error(name, self._sources, exc)

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
        except Exception as exc:  # user code; the module remains as its import created it
            say(f"the state of the module {name} could not be restored from the trainer: {exc}")


def _import_for_effect(name: str) -> None:
    began = time.perf_counter()
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # user code, which may call sys.exit()
        say(
            f"the import of {name}, which the script also imports, fails in feeders: {type(exc).__name__}: {exc}"
        )
    elapsed_s = time.perf_counter() - began
    if elapsed_s > SLOW_IMPORT_S:
        say(
            f"importing {name} took {elapsed_s:.1f} s in a feeder: if samples do not need its effects on other "
            'modules, import it under `if __name__ == "__main__":`'
        )


class _Loader(importlib.machinery.SourceFileLoader):
    """A loader that reads a module's source from the bundle, and other files of a package from disk."""

    def __init__(self, source: Source, on_import: Callable[[str], None]) -> None:
        super().__init__(source.name, source.file or "")
        self._source = source
        self._on_import = on_import

    def get_data(self, path: str) -> bytes:
        return self._source.text if path == self.path else super().get_data(path)

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(f"{path} is not compared with what is compiled on this machine")

    def exec_module(self, module: types.ModuleType) -> None:
        _remember_lines(self.path, self._source.text)
        super().exec_module(module)
        self._on_import(self.name)


def _remember_lines(file: str, text: bytes) -> None:
    """Makes tracebacks and `inspect` show the shipped source lines, even if the file on this machine differs."""
    try:
        lines = importlib.util.decode_source(text).splitlines(keepends=True)
    except (SyntaxError, UnicodeDecodeError):
        return
    linecache.cache[file] = len(text), None, lines, file


def _make_main(main: Mapping[str, Any]) -> None:
    """Puts a fresh `__main__` into sys.modules. It has the script's name and file, but no other content."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=sys.modules["builtins"], __package__=main["package"])
    if main["file"] is not None:
        module.__file__ = main["file"]
        if main["text"]:
            _remember_lines(main["file"], main["text"])
    if main["spec"] is not None:
        module.__spec__ = importlib.machinery.ModuleSpec(main["spec"], None, origin=main["file"])
    sys.modules["__main__"] = module


# Bundles that cannot be loaded


def _explained(exc: Exception, modules: ModuleLoader) -> InputError | None:
    if modules.failed:
        return next(iter(modules.failed.values()))
    if isinstance(exc, ModuleNotFoundError):
        return _missing(exc, "the dataset")
    if isinstance(exc, ImportError) or _lacks_in_module(exc):
        return InputError(
            f"the dataset cannot be loaded in a feeder: {exc}. Feeders seem to have a different version of "
            "that module: install the trainer's version"
        )
    if isinstance(exc, AttributeError):
        return InputError(
            f"the dataset cannot be loaded in a feeder: {exc}. One of its methods, such as __hash__, __eq__ or "
            "__setstate__, is called during unpickling, before the object's attributes are set. Objects that refer to "
            "themselves through keys of a dictionary or members of a set cannot be copied: use a list there, use ids "
            "as keys, or create the objects in worker_init_fn"
        )
    if isinstance(exc, FileNotFoundError):
        return InputError(
            f"the dataset needs {exc.filename or exc!r}, which feeders do not see: mount the trainers' "
            "data volumes in the feeders' template, at the same path"
        )
    return None


def _lacks_in_module(exc: Exception) -> bool:
    """Returns True if the error reports a missing attribute of a module or class. Pickle or a module's __getattr__ may
    have raised the error."""
    return isinstance(exc, AttributeError) and (
        isinstance(exc.obj, types.ModuleType | type)
        or str(exc).startswith(("Can't get attribute", "module '"))
    )


def _import_error(name: str, shipped: Mapping[str, Source], exc: BaseException) -> InputError:
    source = shipped.get(name)
    where = f" ({source.file})" if source is not None and source.file else ""
    if isinstance(exc, ModuleNotFoundError) and exc.name not in shipped:
        error = _missing(exc, f"the module {name!r}{where}")
    else:
        error = InputError(
            f"the dataset needs the module {name!r}{where}, whose import fails in a feeder: "
            f"{type(exc).__name__}: {exc}. It is imported there from the trainer's source, in a process "
            "that has not run the script: make its top level independent of what the script did before"
        )
    error.__cause__ = exc
    return error


def _missing(exc: ModuleNotFoundError, who: str) -> InputError:
    return InputError(
        f"{who} needs the module {exc.name!r}, which feeders do not have: install it in the feeders' image "
        "(the trainer's image plus dataloaderjob[feeder])"
    )
