"""The trainer's side of a bundle: the user's code, its data and the state of its modules, pickled together.

Fingerprints detect changes to large data several times faster than pickling. They are compared only within one process,
so they need not withstand an adversary. A fingerprint sums the 64-bit words of a buffer with random odd weights, modulo
2**64. If one word changes, the sum always changes. If several words change, the sum remains the same with a probability
of about 2**-64.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import marshal
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from dataloaderjob.core import values
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.core.errors import InputError
from dataloaderjob.shipping import module_state, unpicklable
from dataloaderjob.shipping.definitions import Definitions
from dataloaderjob.shipping.module_state import MAIN, ModuleState
from dataloaderjob.shipping.modules import UserModules, is_over, main_source, modules_with_effects
from dataloaderjob.shipping.names import Names
from dataloaderjob.shipping.pickling import Reached
from dataloaderjob.shipping.process_state import ProcessState
from dataloaderjob.shipping.unpicklable import Excluded
from dataloaderjob.shipping.writer import Roots, Writer

SLOW_S = 0.2
"""Pickling time in seconds above which data is checked for changes before it is pickled again."""
_REMEMBERED = 8
_CHUNK_NBYTES = 1 << 20
"""Number of bytes that are processed at a time. Each word is read twice, so this number of bytes must fit into the
second-level cache."""
_LARGE = 4096
"""Minimum number of members at which a container is marshalled instead of pickled."""
_THREADS = min(4, os.cpu_count() or 1)
Blobs = tuple[tuple[str, int], ...]
Fingerprint = tuple[bytes, int]
"""(fingerprint, number of arrays found)."""


@dataclass(slots=True, kw_only=True)
class CodeSnapshot:
    """The content of a bundle's blobs."""

    pickled: memoryview
    buffers: list[memoryview]
    process: bytes
    sources: bytes
    imports: list[tuple[str, bool]]
    """(name, True if the dataset needs it) for each user module to import, in the trainer's order."""
    others: dict[str, bytes]
    """The packed state of each other user module, by name."""
    arrays: int


@dataclass(slots=True)
class _Kind:
    """Information about datasets of one kind."""

    reached: OrderedDict[int, Reached] = field(default_factory=OrderedDict)
    """The modules and globals that the last pickle reached, by the dataset's id. These are only a guess, because ids
    are reused."""
    slow: bool = False

    def note(self, dataset: Any, modules: dict[str, None], reached: Reached) -> None:
        self.reached[id(dataset)] = Reached(modules, reached.main, reached.hints)
        self.reached.move_to_end(id(dataset))
        while len(self.reached) > _REMEMBERED:
            self.reached.popitem(last=False)


class SnapshotMaker:
    """A maker of snapshots of this process. It detects parts that have not changed since the last snapshot."""

    def __init__(self) -> None:
        self._modules = UserModules()
        self._process = ProcessState()
        self._excluded: Excluded = set()
        self._references = module_state.References()
        self._definitions = Definitions()
        self._alone: dict[str, tuple[Any, bytes]] = {}
        """The packed state of each module that the dataset did not reach, with a key that changes with the module's
        content."""
        self._kinds: WeakKeyDictionary[type, dict[Any, _Kind]] = WeakKeyDictionary()
        """The kinds, by the dataset's type, then by the names of the types of all roots."""
        self._patches: list[Any] | None = None
        self._sources: tuple[Any, bytes] | None = None
        self._effects: tuple[bytes, set[str]] | None = None
        """(packed sources, names of the modules that, according to these sources, the script imports for a side
        effect)."""
        self._fingerprints: OrderedDict[Any, Blobs] = OrderedDict()
        self._current: Fingerprint | None = None
        """The fingerprint of the snapshot that is being taken."""
        self._warned = False
        self._warned_of: set[str] = set()
        """Names of the module objects whose omission was reported."""

    def take(self, roots: Roots) -> CodeSnapshot:
        """Takes a snapshot. Raises InputError, which names the part of `roots` that cannot be pickled."""
        writer = self._writer(roots)
        out, buffers = io.BytesIO(), list[memoryview]()
        pickler = writer.write(out, buffers, roots)
        self._kind(roots).note(roots["dataset"], writer.reached.modules, pickler.reached)
        self._patches = [patch for patch in self._patches or () if patch in writer.patches]
        snapshot = CodeSnapshot(
            pickled=out.getbuffer(),
            buffers=buffers,
            process=self._process.packed(),
            sources=self._packed_sources(),
            imports=self._imports(writer.modules, writer.reached),
            others=self._others(writer),
            arrays=pickler.arrays,
        )
        if pickler.shared and not self._warned:
            self._warned = True
            _warn_of_shared(roots, pickler.shared, writer.modules)
        pickler.close()
        return snapshot

    def unchanged(self, roots: Roots, store: BlobStore) -> Blobs | None:
        """Returns the blobs in `store` of an earlier snapshot that equals the current state. Returns None if no
        snapshot equals it, or if taking a new snapshot is as fast as comparing."""
        self._current = None  # the fingerprint may belong to other roots that were found unchanged
        if not self._kind(roots).slow:
            return None
        fingerprint = self._current = self._fingerprint(roots)
        blobs = None if fingerprint is None else self._fingerprints.get(fingerprint[0])
        if blobs is None or not all(store.has(*blob) for blob in blobs):
            return None
        for digest, _ in blobs:
            with contextlib.suppress(OSError):
                os.utime(store.path(digest))  # the blob must not be removed before the bundle is announced
        return blobs

    def remember(self, roots: Roots, snapshot: CodeSnapshot, blobs: Blobs, elapsed_s: float) -> bool:
        """Keeps a fingerprint of the snapshot if taking and storing the snapshot took long. Returns True if a
        fingerprint was kept."""
        fingerprint, self._current = self._current, None
        if elapsed_s < SLOW_S:
            return False
        fingerprint = fingerprint or self._fingerprint(roots)
        # marshal treats an array as bytes, so marshalled containers must not contain arrays.
        if fingerprint is None or fingerprint[1] != snapshot.arrays:
            return False
        self._kind(roots).slow = True
        self._fingerprints[fingerprint[0]] = blobs
        while len(self._fingerprints) > _REMEMBERED:
            self._fingerprints.popitem(last=False)
        return True

    def _fingerprint(self, roots: Roots) -> Fingerprint | None:
        """Returns (fingerprint, number of arrays). Returns None if the roots cannot be pickled, which `take` then
        reports, or if a large container holds anything but plain values."""
        out, buffers, digest = io.BytesIO(), list[memoryview](), _Digest()
        try:
            writer = self._writer(roots)
            pickler = writer.write(out, buffers, roots, digest=digest)
        except InputError:
            return None
        arrays = pickler.arrays
        pickler.close()
        if digest.failed:
            return None
        parts = (
            self._process.packed(),
            self._packed_sources(),
            *self._others(writer).values(),
            out.getvalue(),
        )
        return b"".join((*map(checksum, parts), checksums(buffers))), arrays

    def _others(self, writer: Writer) -> dict[str, bytes]:
        """Returns everything that the dataset does not reach, packed: the state of modules by name, and the script's
        definitions under MAIN."""
        sources, text = self._modules.sources(), main_source()["text"]
        packed = self._definitions.packed(writer.reached, writer.known, writer.modules, sources, text)
        return {**writer.others(), **({MAIN: packed} if packed else {})}

    def _kind(self, roots: Roots) -> _Kind:
        known = self._kinds.setdefault(type(roots["dataset"]), {})
        return known.setdefault(tuple(map(_names, roots.values())), _Kind())

    def _writer(self, roots: Roots) -> Writer:
        modules = self._modules.find()
        if self._patches is None:
            self._patches = module_state.patches(self._modules)
        patches = [*self._patches, *module_state.entries(modules)]
        state = ModuleState(Names(modules), self._excluded, self._references)
        known = self._kind(roots).reached.get(id(roots["dataset"]))
        writer = Writer(modules, patches, self._excluded, state, known, self._alone, self._warned_of)
        writer.forget_mended()
        return writer

    def _imports(self, modules: dict[str, ModuleType], reached: Reached) -> list[tuple[str, bool]]:
        packed = self._packed_sources()
        if self._effects is None or self._effects[0] is not packed:
            self._effects = packed, modules_with_effects(main_source(), self._modules.sources())
        wanted = {name for name in self._effects[1] if name in modules and is_over(modules[name])}
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
    # Does not use getattr with a default, because a dataset may answer for any attribute.
    named = root if isinstance(root, type | FunctionType | MethodType) else type(root)
    return type(root).__qualname__, named.__module__, named.__qualname__


def _warn_of_shared(roots: Roots, addresses: list[int], modules: Mapping[str, ModuleType]) -> None:
    what, where = unpicklable.find_storage(roots, set(addresses), modules)
    warnings.warn(
        f"{where} is {what} in shared memory. Feeders get a copy when the iterator is created: later "
        "writes here are not visible there, and writes there are not visible here. Set values that change "
        "between epochs before iter(), or use num_workers=0",
        stacklevel=2,
    )


# Fingerprints


@cache
def _weights() -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.random.default_rng().integers(0, 1 << 64, _CHUNK_NBYTES // 8, dtype=np.uint64) | np.uint64(1)


def checksum(buffer: Any) -> bytes:
    """Returns a 16-byte checksum of the buffer."""
    data = np.frombuffer(buffer, np.uint8)
    words = data[: data.nbytes // 8 * 8].view(np.uint64)
    weights = _weights()
    scratch = np.empty_like(weights)
    found = hashlib.blake2b(data[words.nbytes :].tobytes(), digest_size=16)
    for start in range(0, len(words), len(weights)):
        part = words[start : start + len(weights)]
        product = np.multiply(part, weights[: len(part)], out=scratch[: len(part)])
        found.update(int(product.sum(dtype=np.uint64)).to_bytes(8, "little"))
    found.update(data.nbytes.to_bytes(8, "little"))
    return found.digest()


def checksums(buffers: Sequence[Any]) -> bytes:
    """Returns the joined checksums of all buffers. Large buffers are processed in parallel, because numpy releases the
    GIL."""
    if sum(buffer.nbytes for buffer in buffers) < 16 * _CHUNK_NBYTES or _THREADS == 1:
        return b"".join(map(checksum, buffers))
    pieces = [
        buffer[start : start + 64 * _CHUNK_NBYTES]
        for buffer in map(_as_bytes, buffers)
        for start in range(0, max(buffer.nbytes, 1), 64 * _CHUNK_NBYTES)
    ]
    with ThreadPoolExecutor(_THREADS) as threads:
        return b"".join(threads.map(checksum, pieces))


def _as_bytes(buffer: memoryview) -> memoryview:
    return buffer.cast("B") if buffer.nbytes else buffer


class _Digest:
    """A callable that replaces large containers of plain values with their checksums, for a fingerprint.

    marshal writes any buffer as bytes, so it does not distinguish different arrays with the same bytes. A caller that
    compares fingerprints must ensure that these containers hold no arrays.
    """

    def __init__(self) -> None:
        self.failed = False
        """True if a container held anything other than plain values. In that case, no fingerprint exists."""

    def __call__(self, container: Any) -> bytes | None:
        """Returns the checksum of a container, or None for a small one, which is pickled."""
        if len(container) < _LARGE:
            return None
        try:
            return checksum(marshal.dumps(container))
        except ValueError:
            self.failed = True
            return b""
