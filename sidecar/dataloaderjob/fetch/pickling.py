"""Pickles the user's code and data for feeders: modules beside the script by value, arrays out of band."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import cloudpickle
import numpy as np
import torch

MIN_BUFFER_NBYTES = 64 * 1024
"""Smaller buffers stay within the pickle."""
_INSTALLED = ("site-packages", "dist-packages")
_OURS = "dataloaderjob"


class UserCodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, protocol 5. Storages of CPU tensors leave as buffers; what is shared stays shared."""

    def __init__(self, file: IO[bytes], take_buffer: Callable[[memoryview], None]) -> None:
        def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
            with buffer.raw() as raw:
                if raw.nbytes < MIN_BUFFER_NBYTES:
                    return True
            take_buffer(buffer.raw())
            return False

        super().__init__(file, protocol=5, buffer_callback=keep_in_band)
        self._storages: dict[int, _SharedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _SharedStorage):
            return _reduce_storage(obj.storage)
        if isinstance(obj, torch.storage.TypedStorage):
            return _typed_storage, (self._shared(obj._untyped_storage), obj.dtype)  # noqa: SLF001
        if isinstance(obj, torch.UntypedStorage):
            return _itself, (self._shared(obj),)
        if isinstance(obj, np.memmap):
            return _reduce_memmap(obj) or super().reducer_override(obj)
        return super().reducer_override(obj)

    def _shared(self, storage: torch.UntypedStorage) -> _SharedStorage:
        # Tensors wrap their storage anew each time, so pickle's memo would not see that two share one.
        return self._storages.setdefault(storage._cdata, _SharedStorage(storage))  # noqa: SLF001


class _SharedStorage:
    """Stands for one storage, however many wrappers it has."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.device.type != "cpu":
        raise TypeError(f"a tensor on {storage.device}; feeders work on CPUs: call .cpu()")
    if storage.nbytes() == 0:
        return torch.UntypedStorage, (0,)
    return _storage, (pickle.PickleBuffer(bytes_of(storage).data),)


def bytes_of(storage: torch.UntypedStorage) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A view of a storage that keeps it alive. Returns: shape (bytes of the storage,)."""
    view: np.ndarray[Any, np.dtype[np.uint8]] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return view


def _storage(buffer: Any) -> torch.UntypedStorage:
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=storage, dtype=dtype, _internal=True
    )


def _itself(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage


def _reduce_memmap(array: np.memmap[Any, Any]) -> tuple[Any, ...] | None:
    """A memmap travels as its file's name: the file may be far larger than what anybody wants to send."""
    name, mapping = array.filename, getattr(array, "_mmap", None)
    if name is None or mapping is None or not array.flags.c_contiguous or array.dtype.hasobject:
        return None
    # A slice keeps its parent's offset, so the place in the file comes from the addresses.
    mapped = np.frombuffer(mapping, dtype=np.uint8).__array_interface__["data"][0]
    into = array.__array_interface__["data"][0] - mapped
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    stat = os.stat(name)
    mode = "c" if array.mode == "c" else "r+" if array.flags.writeable else "r"
    # Size and time of change make another pickle, and so another bundle, of a file that has changed.
    changed = (stat.st_size, stat.st_mtime_ns)
    return _memmap, (str(name), array.dtype, mode, start + into, array.shape, changed)


def _memmap(
    name: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...], changed: tuple[int, int]
) -> Any:
    del changed
    return np.memmap(name, dtype=dtype, mode=mode, offset=offset, shape=shape)


# Modules


def script_folder() -> Path:
    """The folder from which the script imports its own modules; without a script, the working directory."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if not file:
        return Path.cwd()
    # `python -m package.module` imports from the folder that holds the package.
    name = getattr(getattr(main, "__spec__", None), "name", "")
    return Path(file).absolute().parents[name.count(".")]


@contextmanager
def modules_by_value(folder: Path) -> Iterator[None]:
    """Pickles classes and functions of the modules under `folder` by value, except installed packages."""
    registered = cloudpickle.list_registry_pickle_by_value()
    own = [module for module in _modules_under(folder) if module.__name__ not in registered]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_under(folder: Path) -> list[ModuleType]:
    inside = tuple({os.path.join(path, "") for path in (str(folder), os.path.realpath(folder))})
    paths = sysconfig.get_paths()
    outside = tuple(os.path.join(paths[name], "") for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    found = []
    for name, module in list(sys.modules.items()):
        # Not getattr: modules that load lazily would load.
        own = getattr(module, "__dict__", {})
        file = own.get("__file__")
        if not isinstance(file, str) or not file.endswith(".py") or own.get("__name__") != name:
            continue
        file = os.path.abspath(file)
        if not file.startswith(inside) or file.startswith(outside) or name.partition(".")[0] == _OURS:
            continue
        if not any(part in _INSTALLED for part in file.split(os.sep)):
            found.append(module)
    return found
