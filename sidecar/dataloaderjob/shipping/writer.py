"""The writer of a single pickle of the user's code and data. It leaves out objects that cannot be sent."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from dataloaderjob.core.errors import InputError
from dataloaderjob.shipping import module_state, unpicklable
from dataloaderjob.shipping.module_state import CODE, MAIN, ROOTS, ModuleState
from dataloaderjob.shipping.pickling import (
    MIN_BUFFER_NBYTES,
    TRIES,
    Bounded,
    Nowhere,
    Reached,
    TooLargeError,
    UserCodePickler,
    changed_meanwhile,
    picklable,
    why_not,
)
from dataloaderjob.shipping.unpicklable import ENTRY, Excluded

MAX_OTHER_NBYTES = 16 * 1024 * 1024
"""Maximum size, in bytes, of the state of a module that the dataset does not reach. A larger state is left out, with a
warning."""
Roots = Mapping[str, Any]


class _Same:
    """A wrapper that equals another wrapper only if both hold the same object."""

    __slots__ = ("held",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held


class Writer:
    """A writer of a single pickle with the roots and the state that they need."""

    def __init__(
        self,
        modules: dict[str, ModuleType],
        patches: list[Any],
        excluded: Excluded,
        state: ModuleState,
        reached: Reached | None,
        alone: dict[str, tuple[Any, bytes]],
        warned: set[str],
    ) -> None:
        self.modules = modules
        self._excluded = excluded
        self._state = state
        self._alone_before = alone
        self.known = state.known
        self.patches = patches
        self.reached = Reached() if reached is None else reached
        self._discovered = reached is not None
        self._tries = TRIES
        self._warned_of = warned

    def forget_mended(self) -> None:
        """Rechecks the objects of modules that could not be pickled last time. Stops excluding those that now can
        be."""
        before = list(self._excluded)
        self._excluded.clear()
        self._excluded.update(entry for entry in before if entry[0] == MAIN)
        suspects = {entry[:2] for entry in before}
        for module in {module for module, _ in suspects if module in self.known.split}:
            for path, value, pickled in list(module_state.parts(module, self._state)):
                if not suspects.isdisjoint({(module, path), (module, path + ENTRY)}):
                    self._exclude_part(module, path, value, pickled)

    def write(
        self,
        out: io.BytesIO,
        buffers: list[memoryview],
        roots: Roots,
        digest: Callable[[Any], bytes | None] | None = None,
    ) -> UserCodePickler:
        """Writes the pickle, and repeats this until the pickle contains everything that it refers to. Returns the
        pickler. State must precede the objects that use it, so a quick first pass estimates which modules will be
        reached."""
        if not self._discovered:
            self._discover(roots)
        while True:
            out.seek(0)
            out.truncate()
            buffers.clear()
            count = len(self.reached.modules)
            pickler = self._pickler(out, buffers.append, digest=digest)
            if self._dump(pickler, roots):
                if pickler.reached.within(self.reached) and len(self.reached.modules) == count:
                    return pickler
                self.reached.add(pickler.reached)
            pickler.close()

    def _discover(self, roots: Roots) -> None:
        while True:
            count = len(self.reached.modules)
            pickler = self._pickler(Nowhere(), memoryview.release, shallow=True)
            if not self._dump(pickler, roots):
                continue
            for sample in pickler.samples:  # the list grows during the loop
                with contextlib.suppress(Exception):
                    pickler.dump(sample)
            known = pickler.reached.within(self.reached) and len(self.reached.modules) == count
            self.reached.add(pickler.reached)
            pickler.close()
            if known:
                return

    def _pickler(
        self, out: Any, take_buffer: Callable[[memoryview], None] | None, **options: Any
    ) -> UserCodePickler:
        return UserCodePickler(out, take_buffer, known=self.known, user_modules=self.modules, **options)

    def _dump(self, pickler: UserCodePickler, roots: Roots) -> bool:
        """Dumps the state and the roots. Returns False if this failed, but an attempt that leaves out the
        objects that cannot be pickled may succeed. Raises InputError if the roots themselves cannot be pickled."""
        where = ROOTS
        try:
            for module, part in self._state.dumps(self.reached, self.patches):
                where = module
                pickler.dump(part)
            where = ROOTS
            pickler.dump(tuple(roots.values()))
        except Exception as exc:  # any exception of a user's __reduce__
            if changed_meanwhile(exc) and self._tries:
                self._tries -= 1
                return False
            if where != ROOTS and self._exclude(where, roots):
                return False
            raise InputError(
                "feeders need a copy of the dataset and its functions, but this cannot be copied: "
                f"{unpicklable.describe(roots, self.known, self.modules)}"
            ) from exc
        return True

    # Objects that cannot be pickled

    def _can_copy(self, part: Any) -> bool:
        return picklable(part, self.known, self.modules)

    def _exclude(self, where: str, roots: Roots) -> bool:
        """Leaves out the parts of a module's state that cannot be pickled. In feeders, these parts remain as the import
        creates them. Returns False if nothing was left out."""
        before = len(self._excluded), len(self.patches)
        if where == CODE:
            self.patches = [patch for patch in self.patches if self._can_copy(patch)]
        for module in [*self.reached.modules] if where == CODE else [where]:
            self._exclude_parts(module)
        if where in (CODE, MAIN):
            self._exclude_main(roots)
        return (len(self._excluded), len(self.patches)) != before

    def _exclude_parts(self, module: str) -> None:
        if module in self.known.split:
            for path, value, pickled in list(module_state.parts(module, self._state)):
                self._exclude_part(module, path, value, pickled)

    def _exclude_part(self, module: str, path: str, value: Any, pickled: Any) -> None:
        for where, part in unpicklable.failing_parts(path, value, pickled, self._can_copy):
            self._excluded.add((module, where, id(part)))
            if module in self.reached.modules:
                unpicklable.warn(module, where, part, self._warned_of)

    def _exclude_main(self, roots: Roots) -> None:
        """Leaves out the script's globals that cannot be pickled, if only modules' states refer to them. Does nothing
        if the roots themselves cannot be pickled."""
        if why_not(tuple(roots.values()), self.known, self.modules) is not None:
            return
        own = vars(sys.modules[MAIN])
        for name in self.reached.main:
            if name in own and not self._can_copy(own[name]):
                self._excluded.add((MAIN, name, id(own[name])))

    # Modules that the dataset does not reach

    def others(self) -> dict[str, bytes]:
        """Returns the state of each module that the dataset does not reach, if it has any."""
        found = {name: self._alone(name) for name in sorted(self.modules) if name not in self.reached.modules}
        return {name: packed for name, packed in found.items() if packed}

    def _alone(self, module: str) -> bytes:
        if not any(self.known.split[module]):
            return b""
        key = self._key_alone(module)
        known = self._alone_before.get(module)
        if key is None or known is None or known[0] != key:
            known = self._alone_before[module] = key, self._newly_alone(module)
        return known[1]

    def _key_alone(self, module: str) -> Any:
        """Returns a key that equals an earlier one only if the module's content is the same, or None if no such key
        exists. The key contains a plain pickle, which takes a fifth of the time of our own pickle."""
        code, data = self.known.split[module]
        try:
            packed = pickle.dumps([value for _, value in data], protocol=5)
        except Exception:  # user code
            return None
        if len(packed) > MIN_BUFFER_NBYTES:
            return None  # the key is too large to keep
        # The code itself is in the key, to keep it alive so that no other object gets its id.
        return (
            [path for path, _ in code + data],
            [_Same(value) for _, value in code],
            [id(value) for _, value in data],
            packed,
        )

    def _newly_alone(self, module: str) -> bytes:
        try:
            return self._written_alone(module)
        except TooLargeError:
            self._exclude_large(module)
        except Exception:  # user code
            self._exclude_parts(module)
        try:
            return self._written_alone(module)
        except Exception:
            return b""

    def _written_alone(self, module: str) -> bytes:
        out = Bounded(MAX_OTHER_NBYTES)
        pickler = self._pickler(out, None)
        try:
            for _, part in self._state.alone(module, pickler.reached):
                pickler.dump(part)
        finally:
            pickler.close()
        return out.getvalue()

    def _exclude_large(self, module: str) -> None:
        for path, value, pickled in module_state.parts(module, self._state):
            try:
                self._pickler(Bounded(MAX_OTHER_NBYTES), None).dump(pickled)
            except TooLargeError:
                self._excluded.add((module, path, id(value)))
                warnings.warn(
                    f"{module}.{path} holds more than {MAX_OTHER_NBYTES >> 20} MiB and the dataset does "
                    "not refer to that module, so feeders do not get it: a dataset that imports the "
                    "module at run time finds the object that the import creates",
                    stacklevel=2,
                )
            except Exception:
                self._excluded.add((module, path, id(value)))
