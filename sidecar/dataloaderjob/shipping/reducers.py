"""Reduced forms, for pickling, of objects that neither pickle nor cloudpickle handles correctly.

The files /proc/self/maps and /proc/self/smaps show which memory is shared or changed (see proc(5)).
"""

from __future__ import annotations

import bisect
import ctypes
import enum
import functools
import io
import mmap
import os
import pickle
import random
import re
import sys
import types
import typing
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any

import cloudpickle
import numpy as np
import torch

from dataloaderjob.shipping.modules import MAINS
from dataloaderjob.shipping.names import LRU, look_up

_C_DATA: Any = ctypes.c_int.__mro__[-2]
MAX_OWNER_NBYTES = 1024 * 1024
"""Maximum size in bytes of an array that is sent together with a view of it. The maximum is twice the view's size if
that is larger."""
SHARED_MEMORY = (
    "memory and locks of multiprocessing are shared with forked processes only, and feeders are not forked: set a "
    "value that changes between epochs as a plain attribute of the dataset before iter(), keep counters in the "
    "training process (for example in a sampler), or use num_workers=0"
)
_MAPS, _SMAPS = Path("/proc/self/maps"), Path("/proc/self/smaps")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")
_DIRTY = re.compile(r"Private_Dirty: +([0-9]+) kB")
_SHARED_NAMES = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # noqa: S108  nothing is created there
_OURS = "/memfd:dlj-"


_NUMPYS: Any = vars(np.random.mtrand)["_rand"]
_PROCESSES: dict[str, Any] = {
    "numpy": _NUMPYS, "numpy's bits": _NUMPYS._bit_generator, "python": vars(random)["_inst"],  # noqa: SLF001
    "torch": torch.default_generator,
}  # fmt: skip
OF_PROCESS = {id(one): name for name, one in _PROCESSES.items()}
"""Names of the process's own random number generators, by the generators' ids. A generator is sent by name, because a
feeder would not seed a copy."""
KINDS_OF_PROCESS = frozenset(map(type, _PROCESSES.values()))


def _of_process(name: str) -> Any:
    return _PROCESSES[name]


def reduce_special(obj: Any) -> tuple[Any, ...] | str | None:
    """Returns the reduced form of an object that needs a special form, or None for all other objects."""
    cls = type(obj)
    if id(obj) in OF_PROCESS:
        return _of_process, (OF_PROCESS[id(obj)],)
    if cls is LRU:
        if _importable(obj):
            return None
        return _lru_cache, (obj.cache_parameters(), obj.__wrapped__), _extra(obj)
    if cls is functools.cached_property:
        return functools.cached_property, (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}
    if cls is typing.TypeVar:
        return _reduce_type_variable(obj)
    if cls in _TYPE_PARTS and not _importable(obj):
        args = tuple(getattr(obj, name) for name in _TYPE_PARTS[cls])
        return _make_type, (cls, args, obj.__module__)
    if isinstance(obj, torch.jit.ScriptFunction | torch.jit.ScriptModule):
        return _load_scripted, (_scripted(obj),)
    if is_shared_memory(obj):
        raise pickle.PicklingError(SHARED_MEMORY)
    if obj is _MISSING:
        return "MISSING"  # a singleton of dataclasses, compared by identity
    return None


_MISSING = sys.modules["dataclasses"].MISSING
_TYPE_PARTS: dict[Any, tuple[str, ...]] = {
    typing.NewType: ("__name__", "__supertype__"),
    typing.ParamSpec: ("__name__",),
    typing.TypeVarTuple: ("__name__",),
}
"""Attributes from which an object of each type is created. The bound of a ParamSpec has no meaning yet."""


def _make_type(cls: Any, args: tuple[Any, ...], module: str) -> Any:
    made = cls(*args)
    made.__module__ = module
    return made


def _importable(obj: Any) -> bool:
    path = getattr(obj, "__qualname__", obj.__name__)
    return obj.__module__ not in MAINS and look_up(obj.__module__, path) is obj


def _extra(obj: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(obj).items() if name != "__wrapped__"}


def _lru_cache(parameters: dict[str, Any], function: Callable[..., Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def is_single_dispatch(function: types.FunctionType) -> bool:
    own = vars(function)
    return "registry" in own and "_clear_cache" in own and "__wrapped__" in own


def reduce_single_dispatch(function: Any) -> tuple[Any, ...]:
    """Reduces a `functools.singledispatch` function. Its closure holds weak references, which cannot be pickled."""
    others = [(cls, made) for cls, made in function.registry.items() if cls is not object]
    return _single_dispatch, (function.registry[object], others, function.__name__, function.__qualname__)


def _single_dispatch(base: Any, others: list[tuple[type, Any]], name: str, qualname: str) -> Any:
    made: Any = functools.singledispatch(base)
    made.__name__, made.__qualname__ = name, qualname
    for cls, function in others:
        made.register(cls, function)
    return made


def _reduce_type_variable(obj: typing.TypeVar) -> tuple[Any, ...]:
    made, args = cloudpickle.cloudpickle._typevar_reduce(obj)  # noqa: SLF001
    # cloudpickle's tracker id is random, so identical scripts would have different bundles.
    return (made, (*args[:-1], None)) if made is cloudpickle.cloudpickle._make_typevar else (made, args)  # noqa: SLF001


def _scripted(obj: Any) -> bytes:
    out = io.BytesIO()
    torch.jit.save(obj, out)
    return out.getvalue()


def _load_scripted(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]


def is_shared_memory(obj: Any) -> bool:
    """Returns True for a multiprocessing object with memory that only forked processes can share."""
    if isinstance(obj, _C_DATA):
        obj = getattr(obj, "__dict__", {}).get("_wrapper")  # the memory of RawArray and RawValue
    if not type(obj).__module__.startswith("multiprocessing."):
        return False
    from multiprocessing import heap, managers, queues, sharedctypes, synchronize

    shared = (
        synchronize.SemLock, synchronize.Condition, synchronize.Event, managers.BaseProxy, managers.BaseManager,
        sharedctypes.SynchronizedBase, queues.Queue, queues.SimpleQueue,
        heap.BufferWrapper,
    )  # fmt: skip
    return isinstance(obj, shared)


# Tensors and arrays


class SharedStorage:
    """The single representative of a storage that any number of wrappers may refer to."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


def reduce_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.device.type != "cpu":
        raise TypeError(f"a tensor on {storage.device}; feeders work on CPUs: call .cpu()")
    if storage.nbytes() == 0:
        return torch.UntypedStorage, (0,)
    return _storage, (pickle.PickleBuffer(bytes_of(storage).data),)


def bytes_of(storage: torch.UntypedStorage) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns a storage's bytes as a uint8 array of shape (size of the storage,). The view keeps the storage alive."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return view


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage, dtype=dtype, _internal=True
    )


def itself(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def reduce_memmap(array: np.memmap[Any, Any]) -> tuple[Any, ...] | None:
    """Reduces a memmap to its file's name, because the file may be too large to send."""
    name, mapping = array.filename, getattr(array, "_mmap", None)
    if name is None or mapping is None or not array.flags.c_contiguous or array.dtype.hasobject:
        return None
    # A slice has the offset of its parent, so the position in the file is computed from the addresses.
    mapped = np.frombuffer(mapping, dtype=np.uint8).__array_interface__["data"][0]
    into = array.__array_interface__["data"][0] - mapped
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    if array.mode == "c" and _is_dirty(mapped, len(mapping)):
        return None
    stat = os.stat(name)
    mode = "c" if array.mode == "c" else "r+" if array.flags.writeable else "r"
    # The size and the modification time make a changed file yield a different pickle, and therefore a different bundle.
    changed = (stat.st_size, stat.st_mtime_ns)
    return _memmap, (str(name), array.dtype, mode, start + into, array.shape, changed)


def reduce_view(array: np.ndarray[Any, Any]) -> tuple[Any, ...] | None:
    """Reduces a view together with the array that owns its memory, so that writes to one are visible in the other.
    Returns None if that array is much larger or cannot be sent with the view."""
    owner = array.base
    if (
        type(owner) is not np.ndarray
        or owner.nbytes > max(MAX_OWNER_NBYTES, 2 * array.nbytes)
        or owner.dtype.hasobject
        or array.dtype.hasobject
        or not owner.flags.c_contiguous
    ):
        return None
    offset = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return _view, (owner, array.dtype, array.shape, offset, array.strides, array.flags.writeable)


def _view(
    owner: Any, dtype: Any, shape: tuple[int, ...], offset: int, strides: tuple[int, ...], writeable: bool
) -> Any:
    made: np.ndarray[Any, Any] = np.ndarray(shape, dtype, owner, offset, strides)
    if not writeable:
        made.flags.writeable = False
    return made


def _memmap(
    name: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], changed: tuple[int, int]
) -> Any:
    del changed
    return np.memmap(name, dtype=dtype, mode=mode, offset=offset, shape=shape)


def reduce_array(array: np.ndarray[Any, Any]) -> tuple[Any, ...] | None:
    """Reduces an array of a subclass with attributes, because numpy's own reduced form omits attributes. Returns None
    for other arrays."""
    cls: Any = type(array)
    own = getattr(array, "__dict__", None)
    if not own or any(getattr(cls, name) is not getattr(np.ndarray, name) for name in _REDUCING):
        return None
    reduced: Any = array.__reduce__()
    made, args, state = reduced[:3]
    return made, args, (state, {"".join(name): value for name, value in own.items()}), None, None, _set_array


_REDUCING = ("__reduce__", "__reduce_ex__", "__setstate__")


def _set_array(array: Any, given: tuple[Any, dict[str, Any]]) -> None:
    state, own = given
    array.__setstate__(state)
    vars(array).update(own)


# Shared and changed memory


class SharedAddresses:
    """The address ranges of memory that forked processes share, from multiprocessing or `mmap.mmap(-1, ...)`. They are
    read only once, which takes about 1 ms."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for line in _MAPS.read_text(errors="replace").splitlines():
            found = _LINE.match(line)
            if found is not None and found[3].endswith("s") and _is_memory(found[4]):
                self._starts.append(int(found[1], 16))
                self._ends.append(int(found[2], 16))

    def __contains__(self, address: int) -> bool:
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


def _is_memory(name: str) -> bool:
    """Returns True for a mapping of shared memory. Returns False for a file, which feeders map by its name, and for
    memory that contains our batches."""
    return (name.startswith(_SHARED_NAMES) or "/pymp-" in name) and not name.startswith(_OURS)


def _is_dirty(address: int, nbytes: int) -> bool:
    """Returns True if a private mapping of a file was written to in this range."""
    within = False
    for line in _SMAPS.read_text(errors="replace").splitlines():
        if (found := _LINE.match(line)) is not None:
            within = int(found[1], 16) < address + nbytes and address < int(found[2], 16)
        elif within and (dirty := _DIRTY.match(line)) is not None and dirty[1] != "0":
            return True
    return False


# Sets

_SORTABLE = frozenset({str, bytes, int, float, bool})


def ordered(members: set[Any] | frozenset[Any]) -> list[Any] | None:
    """Returns the members in an order that is the same in every process, or None if they can be ordered only by their
    hashes."""
    types_of = set(map(type, members))
    if len(types_of) == 1 and types_of <= _SORTABLE:
        return sorted(members)
    keys = [(_order(member), member) for member in members]
    if any(key is None for key, _ in keys):
        return None
    return [member for _, member in sorted(keys, key=lambda pair: pair[0] or ())]


def _order(member: Any) -> tuple[str, str] | None:
    cls = type(member)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(member, enum.Enum):
        return name, member.name
    if cls in (str, bytes, int, float, bool, complex, type(None), date, datetime, time, timedelta, Decimal):
        return name, repr(member)
    if isinstance(member, PurePath):
        return name, str(member)
    if isinstance(member, type):
        return "type", f"{member.__module__}.{member.__qualname__}"
    if cls in (tuple, frozenset):
        parts = [_order(part) for part in member]
        if all(part is not None for part in parts):
            return name, repr(sorted(str(part) for part in parts) if cls is frozenset else parts)
    return None


def reduce_text_file(file: io.TextIOWrapper) -> Any:
    """Reduces sys.stdout and sys.stderr. Raises TypeError for other files, because cloudpickle would copy a file into a
    StringIO, which has different offsets."""
    for name in ("stdout", "stderr"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError(f"cannot pickle '_io.TextIOWrapper' object, the file {getattr(file, 'name', '')}")


_FILENAME = 10
"""Index of the file's name in the arguments of `types.CodeType`, in all versions since Python 3.10."""


def reduce_code(code: types.CodeType) -> Any:
    """Reduces a code object as cloudpickle does, but keeps the file's name, for tracebacks, debuggers and
    `inspect.getsource`.

    Since version 3.1.3, cloudpickle replaces the name with `<dynamic-code>`.
    """
    made, args = cloudpickle.cloudpickle._code_reduce(code)  # noqa: SLF001
    return made, (*args[:_FILENAME], code.co_filename, *args[_FILENAME + 1 :])
