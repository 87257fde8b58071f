"""The trainer's side of a bundle: the user's code and data and the state of its modules, pickled together."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from dataloaderjob.core import values
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.core.errors import InputError
from dataloaderjob.fetch import culprit, effects, left_out, module_state, unchanged
from dataloaderjob.fetch.definitions import Definitions
from dataloaderjob.fetch.left_out import ENTRY, Excluded
from dataloaderjob.fetch.module_state import CODE, MAIN, ROOTS, State
from dataloaderjob.fetch.modules import UserModules, main_source
from dataloaderjob.fetch.names import Names
from dataloaderjob.fetch.pickling import (
    MIN_BUFFER_NBYTES,
    TRIES,
    Nowhere,
    Reached,
    UserCodePickler,
    changed_meanwhile,
    picklable,
    why_not,
)
from dataloaderjob.fetch.process_state import ProcessState

SLOW_S = 0.2
"""What takes longer to pickle is looked at for changes before it is pickled again."""
MAX_OTHER_NBYTES = 16 * 1024 * 1024
"""State of a module that the dataset does not reach: more than this is left out, with a warning."""
_REMEMBERED = 8
Roots = Mapping[str, Any]
Blobs = tuple[tuple[str, int], ...]
Fingerprint = tuple[bytes, int]
"""The sum, and the number of arrays that were met."""


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """All that a bundle's blobs hold."""

    pickled: memoryview
    buffers: list[memoryview]
    process: bytes
    sources: bytes
    imports: list[tuple[str, bool]]
    """User modules to import, in the trainer's order, and whether the dataset needs them."""
    others: dict[str, bytes]
    """State of each other user module."""
    arrays: int


@dataclass(slots=True)
class _Kind:
    """What is known of datasets of one kind."""

    reached: Reached | None = None
    """What the pickle reached last time."""
    slow: bool = False


class _Same:
    """Equal to another only if both hold one object."""

    __slots__ = ("held",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held


class _TooLargeError(Exception):
    """State of a module that nobody may ever import is larger than what is worth sending."""


class _Bounded(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() > MAX_OTHER_NBYTES:
            raise _TooLargeError
        return super().write(data)


class Snapshots:
    """Takes snapshots of this process, and knows what did not change since the last."""

    def __init__(self) -> None:
        self._modules = UserModules()
        self._process = ProcessState()
        self._excluded: Excluded = set()
        self._references = module_state.References()
        self._definitions = Definitions()
        self._alone: dict[str, tuple[Any, bytes]] = {}
        """State of modules that the dataset did not reach, with what it was made from."""
        self._kinds: WeakKeyDictionary[type, dict[Any, _Kind]] = WeakKeyDictionary()
        """By type of the dataset, then by names of all roots' types."""
        self._patches: list[Any] | None = None
        self._sources: tuple[Any, bytes] | None = None
        self._effects: tuple[bytes, set[str]] | None = None
        """Modules that the script imports for what their import does, with the sources that tell."""
        self._fingerprints: OrderedDict[Any, Blobs] = OrderedDict()
        self._current: Fingerprint | None = None
        """Taken for the snapshot that is being made."""
        self._warned = False
        self._told: set[str] = set()
        """What of modules was said to be left out."""

    def take(self, roots: Roots) -> Snapshot:
        """Raises InputError naming the part of `roots` that cannot be pickled."""
        maker = self._maker(roots)
        out, buffers = io.BytesIO(), list[memoryview]()
        pickler = maker.write(out, buffers, roots)
        self._kind(roots).reached = maker.reached
        self._patches = [patch for patch in self._patches or () if patch in maker.patches]
        snapshot = Snapshot(
            pickled=out.getbuffer(),
            buffers=buffers,
            process=self._process.packed(),
            sources=self._packed_sources(),
            imports=self._imports(maker.modules, maker.reached),
            others=self._others(maker),
            arrays=pickler.arrays,
        )
        if pickler.shared and not self._warned:
            self._warned = True
            _warn_of_shared(roots, pickler.shared, maker.modules)
        pickler.close()
        return snapshot

    def unchanged(self, roots: Roots, store: BlobStore) -> Blobs | None:
        """Returns the blobs of an earlier snapshot in `store` that a new one would equal; None if there is none,
        or if a new one is as quickly made."""
        self._current = None  # it may be that of other roots, which were found unchanged
        if not self._kind(roots).slow:
            return None
        fingerprint = self._current = self._fingerprint(roots)
        blobs = None if fingerprint is None else self._fingerprints.get(fingerprint[0])
        if blobs is None or not all(store.has(*blob) for blob in blobs):
            return None
        for digest, _ in blobs:
            with contextlib.suppress(OSError):
                os.utime(store.path(digest))  # not to be swept before the bundle is announced
        return blobs

    def remember(self, roots: Roots, snapshot: Snapshot, blobs: Blobs, elapsed_s: float) -> bool:
        """Keeps a fingerprint of what took long to pickle and to hash. Returns whether there is one."""
        fingerprint, self._current = self._current, None
        if elapsed_s < SLOW_S:
            return False
        fingerprint = fingerprint or self._fingerprint(roots)
        # marshal takes an array for bytes: none may be within what it stands for.
        if fingerprint is None or fingerprint[1] != snapshot.arrays:
            return False
        self._kind(roots).slow = True
        self._fingerprints[fingerprint[0]] = blobs
        while len(self._fingerprints) > _REMEMBERED:
            self._fingerprints.popitem(last=False)
        return True

    def _fingerprint(self, roots: Roots) -> Fingerprint | None:
        """Returns (fingerprint, arrays met); None for what cannot be pickled, which then gets its message."""
        out, buffers, digest = io.BytesIO(), list[memoryview](), unchanged.Digest()
        try:
            maker = self._maker(roots)
            pickler = maker.write(out, buffers, roots, digest=digest)
        except InputError:
            return None
        arrays = pickler.arrays
        pickler.close()
        if digest.failed:
            return None
        parts = (
            self._process.packed(),
            self._packed_sources(),
            *self._others(maker).values(),
            out.getvalue(),
        )
        return b"".join((*map(unchanged.checksum, parts), unchanged.checksums(buffers))), arrays

    def _others(self, maker: _Maker) -> dict[str, bytes]:
        """What the dataset does not reach: state of modules, and definitions of the script."""
        sources, text = self._modules.sources(), main_source()["text"]
        packed = self._definitions.packed(maker.reached, maker.known, maker.modules, sources, text)
        return {**maker.others(), **({MAIN: packed} if packed else {})}

    def _kind(self, roots: Roots) -> _Kind:
        known = self._kinds.setdefault(type(roots["dataset"]), {})
        return known.setdefault(tuple(map(_names, roots.values())), _Kind())

    def _maker(self, roots: Roots) -> _Maker:
        modules = self._modules.find()
        if self._patches is None:
            self._patches = module_state.patches(self._modules)
        patches = [*self._patches, *module_state.entries()]
        state = State(Names(modules), self._excluded, self._references)
        known = self._kind(roots).reached
        maker = _Maker(modules, patches, self._excluded, state, known, self._alone, self._told)
        maker.forget_mended()
        return maker

    def _imports(self, modules: dict[str, ModuleType], reached: Reached) -> list[tuple[str, bool]]:
        packed = self._packed_sources()
        if self._effects is None or self._effects[0] is not packed:
            self._effects = packed, effects.modules(main_source(), self._modules.sources())
        wanted = {name for name in self._effects[1] if name in modules and effects.is_over(modules[name])}
        return [
            (name, name in reached.modules) for name in modules if name in reached.modules or name in wanted
        ]

    def _packed_sources(self) -> bytes:
        sources, main = self._modules.sources(), main_source()
        if self._sources is None or self._sources[0] != (main, sources):
            packed = values.pack((main, [source.packed() for source in sources]))
            self._sources = (main, sources), packed
        return self._sources[1]


def _names(root: Any) -> tuple[Any, ...]:
    # A dataset may have any attribute that it is asked for.
    named = root if isinstance(root, type | FunctionType | MethodType) else type(root)
    return type(root).__qualname__, named.__module__, named.__qualname__


class _Maker:
    """Writes one pickle of the roots and of the state that they need."""

    def __init__(
        self,
        modules: dict[str, ModuleType],
        patches: list[Any],
        excluded: Excluded,
        state: State,
        reached: Reached | None,
        alone: dict[str, tuple[Any, bytes]],
        told: set[str],
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
        self._told = told

    def forget_mended(self) -> None:
        """Looks again at what did not pickle the last time."""
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
        """Writes until all that the pickle refers to is in it. What is reached is guessed beforehand by a look at
        the code, since state has to come before what uses it."""
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
            pickler = self._pickler(Nowhere(), lambda buffer: buffer.release(), shallow=True)
            if not self._dump(pickler, roots):
                continue
            for sample in pickler.samples:  # grows meanwhile
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
        """Dumps everything. Returns whether it did; if not, what did not pickle will be left out next time."""
        where = ROOTS
        try:
            for module, part in self._state.dumps(self.reached, self.patches):
                where = module
                pickler.dump(part)
            where = ROOTS
            pickler.dump(tuple(roots.values()))
        except Exception as exc:  # whatever a __reduce__ of the user raises
            if changed_meanwhile(exc) and self._tries:
                self._tries -= 1
                return False
            if where != ROOTS and self._exclude(where, roots):
                return False
            raise InputError(
                f"feeders need a copy of the dataset and its functions, and this cannot be copied: "
                f"{culprit.find(roots, self.known, self.modules)}. Make it in worker_init_fn or when "
                "__getitem__ first needs it, or leave it out in __getstate__"
            ) from exc
        return True

    # What does not pickle

    def _why_not(self, part: Any) -> BaseException | None:
        return why_not(part, self.known, self.modules)

    def _exclude(self, where: str, roots: Roots) -> bool:
        """Leaves out what of a module's state does not pickle: there, it stays as the import makes it."""
        before = len(self._excluded), len(self.patches)
        if where == CODE:
            self.patches = [patch for patch in self.patches if picklable(patch, self.known, self.modules)]
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
        def can_copy(part: Any) -> bool:
            return picklable(part, self.known, self.modules)

        for where, part in left_out.find(path, value, pickled, can_copy):
            self._excluded.add((module, where, id(part)))
            if module in self.reached.modules:
                left_out.warn(module, where, part, self._told)

    def _exclude_main(self, roots: Roots) -> None:
        """Leaves out globals of the script that only a module's state refers to; the dataset's own must pickle."""
        if self._why_not(tuple(roots.values())) is not None:
            return
        own = vars(sys.modules[MAIN])
        for name in self.reached.main:
            if name in own and not picklable(own[name], self.known, self.modules):
                self._excluded.add((MAIN, name, id(own[name])))

    # Modules that the dataset does not reach

    def others(self) -> dict[str, bytes]:
        """Returns the state of each, where there is any."""
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
        """Equal to that of an earlier state only if the module holds the same; None where this is not known.
        A plain pickle takes a fifth of the time of ours."""
        code, data = self.known.split[module]
        try:
            packed = pickle.dumps([value for _, value in data], protocol=5)
        except Exception:  # user code
            return None
        if len(packed) > MIN_BUFFER_NBYTES:
            return None  # not to be kept
        # The code itself is in the key, so that it lives and no other can have its id.
        return (
            [path for path, _ in code + data],
            [_Same(value) for _, value in code],
            [id(value) for _, value in data],
            packed,
        )

    def _newly_alone(self, module: str) -> bytes:
        try:
            return self._written_alone(module)
        except _TooLargeError:
            self._exclude_large(module)
        except Exception:  # user code
            self._exclude_parts(module)
        try:
            return self._written_alone(module)
        except Exception:
            return b""

    def _written_alone(self, module: str) -> bytes:
        out = _Bounded()
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
                self._pickler(_Bounded(), None).dump(pickled)
            except _TooLargeError:
                self._excluded.add((module, path, id(value)))
                warnings.warn(
                    f"{module}.{path} holds more than {MAX_OTHER_NBYTES >> 20} MiB and the dataset does not refer to "
                    "that module, so feeders do not get it: a dataset that imports the module while it runs finds "
                    "there what the import makes",
                    stacklevel=2,
                )
            except Exception:
                self._excluded.add((module, path, id(value)))


def _warn_of_shared(roots: Roots, addresses: list[int], modules: Mapping[str, ModuleType]) -> None:
    what, where = culprit.find_storage(roots, set(addresses), modules)
    warnings.warn(
        f"{where} is {what} in shared memory. Feeders get a copy of it as it is when the iterator is made: "
        "what is written to it later is not seen there, and what is written there is not seen here. Set "
        "what changes between epochs before iter(), or use num_workers=0",
        stacklevel=2,
    )
