"""Pickling of the user's code and data for feeders. The content of `__main__` is pickled by value, and the code of
other modules by reference. Objects of user modules are pickled by name, and arrays out of band. The same script yields
the same bytes in every process.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import io
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import cloudpickle
import numpy as np
import torch

from dataloaderjob.shipping import names, reducers, user_code
from dataloaderjob.shipping.modules import MAINS, is_defined_at, is_mock

MIN_BUFFER_NBYTES = 64 * 1024
"""Minimum size of an out-of-band buffer, in bytes. Smaller buffers stay inside the pickle."""
SHALLOW = 64
"""Minimum number of members at which a shallow pickle examines only the first member of a container."""
TRIES = 20
"""Number of attempts to pickle a container while other threads add members to it."""
_cloudpickle: Any = cloudpickle.cloudpickle
_PLAIN_TYPES = {type(None), type(Ellipsis), type(NotImplemented), *_cloudpickle._BUILTIN_TYPE_NAMES}  # noqa: SLF001
_SETS = frozenset({set, frozenset})
_ATOMS = frozenset({str, int, float, bool, type(None), bytes, tuple})
_BY_NAME = frozenset({"globals", "eval", "exec", "vars"})
"""Functions with which code can access a global without containing the global's name."""
DYNAMIC = "*"
_NAMED, _SET, _LARGE = "name", "set", "large"


@dataclass(slots=True)
class Reached:
    """Modules and globals that a pickle refers to."""

    modules: dict[str, None] = field(default_factory=dict)
    """User modules."""
    main: dict[str, None] = field(default_factory=dict)
    """Globals of `__main__`."""
    hints: dict[str, None] = field(default_factory=dict)
    """Globals of `__main__` that may be looked up by name. DYNAMIC stands for any global."""

    def within(self, other: Reached) -> bool:
        return (
            self.modules.keys() <= other.modules.keys()
            and self.main.keys() <= other.main.keys()
            and self.hints.keys() <= other.hints.keys()
        )

    def add(self, other: Reached) -> None:
        self.modules |= other.modules
        self.main |= other.main
        self.hints |= other.hints


class UserCodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A cloudpickle pickler with protocol 5. Storages of CPU tensors become buffers, and shared objects remain
    shared."""

    def __init__(
        self,
        file: IO[bytes],
        take_buffer: Callable[[memoryview], None] | None,
        *,
        known: names.Names | None = None,
        user_modules: Collection[str] = (),
        reached: Reached | None = None,
        digest: Callable[[Any], bytes | None] | None = None,
        shallow: bool = False,
        wrappers: dict[int, tuple[Any, bool]] | None = None,
    ) -> None:
        """If `digest` is given, its results replace containers of plain values, and the pickle cannot be loaded.
        Without `take_buffer`, all buffers stay inside the pickle."""

        def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
            if take_buffer is None:
                return True
            with buffer.raw() as raw:
                if raw.nbytes < MIN_BUFFER_NBYTES:
                    return True
            take_buffer(buffer.raw())
            return False

        # cloudpickle's table is a ChainMap, and a lookup in it takes as long as pickling a small object.
        self.dispatch_table = {
            **copyreg.dispatch_table,
            **_cloudpickle.Pickler._dispatch_table,  # noqa: SLF001
            io.TextIOWrapper: reducers.reduce_text_file,
            types.CodeType: reducers.reduce_code,
        }
        super().__init__(file, protocol=5, buffer_callback=keep_in_band)
        self.reached = Reached() if reached is None else reached
        self.samples: list[Any] = []
        """The first member of each container that a shallow pickle leaves out."""
        self.shared: list[int] = []
        """Addresses of storages and arrays in memory that forked processes share."""
        self._shared_memory: reducers.SharedAddresses | None = None
        self.arrays = 0
        """Number of numpy arrays and scalars found."""
        self._known = known
        self._wrappers = wrappers if wrappers is not None else {} if known is None else known.wrappers
        self._user_modules = user_modules
        self._storages: dict[int, reducers.SharedStorage] = {}
        self._globals: dict[str, user_code.Globals] = {}
        self._ordinary: set[type] = set()
        """Types whose objects need no special treatment."""
        self._main = vars(sys.modules["__main__"])
        self._ids: dict[int, tuple[Any, Any]] = {}
        self._shallow = shallow
        self._digest = digest
        self.persistent_id = self._persistent_id_function()

    # Objects by name, and sets

    def _persistent_id_function(self) -> Callable[[Any], Any]:
        # This runs for every object, including integers. It takes 0.6 s for 1e6 dicts, so nothing is looked up twice.
        table = {} if self._known is None else self._known.table
        special = self._special

        if self._shallow or self._digest is not None:
            large = frozenset({list, dict, tuple, set})

            def with_large(obj: Any) -> Any:
                cls = type(obj)
                if id(obj) in table or cls in _SETS or (cls in large and len(obj) >= SHALLOW):
                    return special(obj)
                return None

            return with_large

        def persistent_id(
            obj: Any,
            type: Any = type,  # noqa: A002
            atoms: Any = _ATOMS,
            table: Any = table,
            sets: Any = _SETS,
        ) -> Any:
            cls = type(obj)
            if cls not in atoms and (id(obj) in table or cls in sets):
                return special(obj)
            return None

        return persistent_id

    def _special(self, obj: Any) -> Any:
        known = self._ids.get(id(obj))
        if known is None:
            known = self._ids[id(obj)] = obj, self._special_id(obj)
        return known[1]

    def _special_id(self, obj: Any) -> Any:
        named = None if self._known is None else self._known.table.get(id(obj))
        if named is not None:
            name = named[1]
            if names.kind(obj) != "opaque" or not picklable(obj, None, self._user_modules):
                self.reached.modules[name[0]] = None
                return _NAMED, *name
            return None
        if type(obj) in _SETS:
            members = reducers.ordered(obj)
            if members is None:
                return None
            return _SET, len(self._ids), type(obj) is frozenset, members
        if self._digest is not None:
            digest = self._digest(obj)
            return None if digest is None else (_LARGE, digest)
        if self._shallow:
            self.samples.append(next(iter(obj.items() if type(obj) is dict else obj)))
            return _LARGE
        return None

    def close(self) -> None:
        """Breaks the reference cycle that would keep pickled objects in memory until the next garbage collection."""
        # Does not use clear_memo: a garbage collection during the call, in any thread, would follow pointers to freed
        # objects.
        self.persistent_id = lambda obj: None  # noqa: ARG005
        self._ids.clear()

    # Functions, classes and others

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        if cls in self._ordinary:
            return NotImplemented
        if cls is types.FunctionType:
            return self._function(obj)
        if issubclass(cls, type):
            return self._class(obj)
        if cls is types.ModuleType:
            return self._module(obj)
        if cls is user_code.Globals:
            return user_code.module_globals, (obj.name,)
        if cls is reducers.SharedStorage:
            return reducers.reduce_storage(obj.storage)
        if isinstance(obj, torch.storage.TypedStorage):
            return reducers.typed_storage, (self._shared(obj._untyped_storage), obj.dtype)  # noqa: SLF001
        if isinstance(obj, torch.UntypedStorage):
            return reducers.itself, (self._shared(obj),)
        if isinstance(obj, np.ndarray | np.generic):
            self.arrays += 1
            if isinstance(obj, np.memmap):
                return reducers.reduce_memmap(obj) or NotImplemented
            if cls is not np.ndarray and isinstance(obj, np.ndarray):
                return reducers.reduce_array(obj) or NotImplemented
            if obj.base is None or cls is not np.ndarray:
                return NotImplemented
            self._note_shared(obj.__array_interface__["data"][0])
            return reducers.reduce_view(obj) or NotImplemented
        found = reducers.reduce_special(obj)
        if found is not None:
            return found
        if cls.__module__ == "unittest.mock" and isinstance(obj, tuple):
            # These objects would recurse while they are loaded.
            raise TypeError("the calls that a mock has recorded cannot be copied")
        if names.delegates(cls):
            # The object's own reduced form, with a function that restores the state.
            return *(*obj.__reduce_ex__(4), None, None, None)[:5], names.set_state
        if cls is not names.LRU and cls not in reducers.KINDS_OF_PROCESS:
            self._ordinary.add(cls)
        return NotImplemented

    def _shared(self, storage: torch.UntypedStorage) -> reducers.SharedStorage:
        # A tensor returns a new wrapper of its storage each time, so pickle's memo would not recognize shared storages.
        key = storage._cdata  # noqa: SLF001
        if key not in self._storages:
            self._storages[key] = reducers.SharedStorage(storage)
            if storage.device.type == "cpu":
                self._note_shared(storage.data_ptr())
        return self._storages[key]

    def _note_shared(self, address: int) -> None:
        if self._shared_memory is None:
            self._shared_memory = reducers.SharedAddresses()
        if address in self._shared_memory:
            self.shared.append(address)

    def _module(self, module: types.ModuleType) -> Any:
        name = module.__name__
        if name in MAINS:
            return importlib.import_module, ("__main__",)
        if sys.modules.get(name) is not module:
            return NotImplemented
        if name in self._user_modules:
            self.reached.modules[name] = None
        return importlib.import_module, (name,)

    def _by_reference(self, obj: Any) -> bool:
        """Returns True if the object can be found by import. Records the modules and globals that the object needs."""
        module, path = getattr(obj, "__module__", None), obj.__qualname__
        if module is None:
            module = _cloudpickle._whichmodule(obj, path)  # noqa: SLF001
        if module in MAINS:
            name = path.partition(".")[0]
            if name in self._main and names.look_up("__main__", path) is obj:
                self.reached.main[name] = None
            return False
        if names.look_up(module, path) is not obj:
            return False
        self._note_globals(module)
        if is_mock(obj):
            return False
        return is_defined_at(obj, module, path) or not self._travels(obj)

    def _travels(self, wrapper: types.FunctionType) -> bool:
        """Returns True if a wrapper, which has another function's name, can be sent by value. If it cannot, for example
        because it holds a lock, it remains as the import created it."""
        if wrapper.__globals__ is self._main:
            return True
        if id(wrapper) not in self._wrappers:
            self._wrappers[id(wrapper)] = wrapper, True  # the wrapper may refer to itself
            state = user_code.function_state(wrapper, wrapper.__globals__)
            exc = why_not(state, self._known, self._user_modules, alone=True, wrappers=self._wrappers)
            self._wrappers[id(wrapper)] = wrapper, exc is None
        return self._wrappers[id(wrapper)][1]

    def _class(self, cls: type) -> Any:
        if cls in _PLAIN_TYPES:
            return _cloudpickle._class_reduce(cls)  # noqa: SLF001
        if self._by_reference(cls):
            return NotImplemented
        if (alias := user_code.other_name(cls)) is not None:
            return user_code.attribute, alias
        self._note_globals(cls.__module__)
        if cls.__module__ in MAINS:
            self.reached.hints |= user_code.names_in_annotations(cls)
        return user_code.reduce_class(cls)

    def _function(self, function: types.FunctionType) -> Any:
        if self._by_reference(function):
            return NotImplemented
        if reducers.is_single_dispatch(function):
            return reducers.reduce_single_dispatch(function)
        own = function.__globals__
        module = own.get("__name__")
        if own is self._main:
            module = "__main__"
            used = user_code.globals_used(function.__code__)
            self.reached.main.update((name, None) for name in used if name in own)
            if not _BY_NAME.isdisjoint(used):
                self.reached.hints[DYNAMIC] = None
        elif not isinstance(module, str) or getattr(sys.modules.get(module), "__dict__", None) is not own:
            # The function's namespace belongs to no module, so the function is reduced as in cloudpickle.
            return self._dynamic_function_reduce(function)
        else:
            self._note_globals(module)
        shared = self._globals.setdefault(module, user_code.Globals(module))
        # The closure's cells are filled later, because their content may refer back to the function.
        cells = (
            None if function.__closure__ is None else tuple(types.CellType() for _ in function.__closure__)
        )
        return (
            user_code.make_function, (function.__code__, shared, cells), user_code.function_state(function, own),
            None, None, user_code.set_function_state,
        )  # fmt: skip

    def _note_globals(self, module: str) -> None:
        if module in self._user_modules:
            self.reached.modules[module] = None


class Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


class TooLargeError(Exception):
    """The error for an optional pickle that is too large to send."""


class Bounded(io.BytesIO):
    """A buffer that raises TooLargeError instead of exceeding `most_nbytes` bytes."""

    def __init__(self, most_nbytes: int) -> None:
        super().__init__()
        self._most_nbytes = most_nbytes

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._most_nbytes:
            raise TooLargeError
        return super().write(data)


def why_not(
    obj: Any,
    known: names.Names | None = None,
    user_modules: Collection[str] = (),
    *,
    alone: bool = False,
    wrappers: dict[int, tuple[Any, bool]] | None = None,
) -> BaseException | None:
    """Pickles `obj` and, unless `alone`, the globals of `__main__` that it needs. Returns the exception that pickling
    raises, or None."""
    out: Any = Nowhere()
    pickler = UserCodePickler(
        out, memoryview.release, known=known, user_modules=user_modules, wrappers=wrappers
    )
    try:
        for part in (obj,) if alone else with_main(obj, pickler.reached):
            pickler.dump(part)
    except Exception as exc:  # any exception of a user's __reduce__
        return _without_frames(exc)
    finally:
        pickler.close()
    return None


def _without_frames(exc: BaseException) -> BaseException:
    """Removes the tracebacks of the exception and of the exceptions that led to it. Returns the exception.

    If a caller keeps the exception in a variable, its traceback and the caller's frame refer to each other. This cycle
    would keep alive everything in the callers' frames, such as a loader's iterator.
    """
    one: BaseException | None = exc
    while one is not None and one.__traceback__ is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return exc


def changed_meanwhile(exc: BaseException) -> bool:
    """Returns True if another thread modified a container while it was being pickled, so that another attempt may
    succeed."""
    return isinstance(exc, RuntimeError) and "during iteration" in str(exc)


def picklable(obj: Any, known: names.Names | None, user_modules: Collection[str]) -> bool:
    """Returns True if `obj` can be pickled by itself."""
    for _ in range(TRIES):
        exc = why_not(obj, known, user_modules, alone=True)
        if exc is None or not changed_meanwhile(exc):
            break
    return exc is None


def with_main(obj: Any, reached: Reached, *, with_names: bool = False) -> Iterator[Any]:
    """Yields `obj`, then each global of `__main__` that `reached` contains, including globals that are added while the
    consumer pickles. With `with_names`, yields (name, global) instead of a global."""
    yield obj
    main, done = vars(sys.modules["__main__"]), set[str]()
    while new := [name for name in reached.main if name not in done]:
        for name in new:
            done.add(name)
            if name in main:
                yield (name, main[name]) if with_names else main[name]


def rest_of(unpickler: Any) -> Iterator[Any]:
    """Yields the objects of all remaining dumps."""
    with contextlib.suppress(EOFError):
        while True:
            yield unpickler.load()


class UserCodeUnpickler(pickle.Unpickler):
    """An unpickler for the output of UserCodePickler, one dump at a time."""

    def __init__(self, file: IO[bytes], buffers: Any, fresh: names.Fresh) -> None:
        super().__init__(file, buffers=buffers)
        self._fresh = fresh
        self._sets: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == _NAMED:
            # If a module's import fails, new objects replace the module's own objects.
            with contextlib.suppress(Exception):
                importlib.import_module(pid[1])
            return self._fresh.find(*pid[1:])
        _, number, frozen, members = pid
        if number not in self._sets:
            self._sets[number] = frozenset(members) if frozen else set(members)
        return self._sets[number]
