"""Whether large data is what it was: fingerprints within one process, several times faster than a pickle.

A fingerprint is compared with an earlier one of the same process only, so it need not withstand an
adversary: buffers are summed with random odd weights for each 64-bit word, modulo 2**64, which any change
of one word alters, and a change of several with a chance of about 2**-64 not.

Which memory this process shares with others, or has changed, the kernel tells (proc(5)).
"""

from __future__ import annotations

import bisect
import hashlib
import marshal
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_NBYTES = 1 << 20
"""Fits the second-level cache, for each word is read twice."""
LARGE = 4096
"""Members of a container that is marshalled instead of pickled."""
_THREADS = min(4, os.cpu_count() or 1)
MAPS, SMAPS = Path("/proc/self/maps"), Path("/proc/self/smaps")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")
_DIRTY = re.compile(r"Private_Dirty: +([0-9]+) kB")
_NAMES = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # noqa: S108  nothing is made there
_OURS = "/memfd:dlj-"


@cache
def _weights() -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.random.default_rng().integers(0, 1 << 64, CHUNK_NBYTES // 8, dtype=np.uint64) | np.uint64(1)


def checksum(buffer: Any) -> bytes:
    """A sum of the buffer's bytes, in 16 bytes."""
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
    """Sums up all buffers together; large ones side by side (numpy works without the GIL)."""
    if sum(buffer.nbytes for buffer in buffers) < 16 * CHUNK_NBYTES or _THREADS == 1:
        return b"".join(map(checksum, buffers))
    pieces = [
        buffer[start : start + 64 * CHUNK_NBYTES]
        for buffer in map(_as_bytes, buffers)
        for start in range(0, max(buffer.nbytes, 1), 64 * CHUNK_NBYTES)
    ]
    with ThreadPoolExecutor(_THREADS) as threads:
        return b"".join(threads.map(checksum, pieces))


def _as_bytes(buffer: memoryview) -> memoryview:
    return buffer.cast("B") if buffer.nbytes else buffer


class Digest:
    """Stands for large lists, dicts, tuples and sets of plain values in a fingerprint.

    marshal writes any buffer as bytes, so it does not tell an array from another of the same bytes:
    who compares has to know that no arrays are in it.
    """

    def __init__(self) -> None:
        self.failed = False
        """Something else was in one: there is no fingerprint."""

    def __call__(self, container: Any) -> bytes | None:
        """Returns None for a small one, which is pickled."""
        if len(container) < LARGE:
            return None
        try:
            return checksum(marshal.dumps(container))
        except ValueError:
            self.failed = True
            return b""


class SharedMemory:
    """Addresses that forked processes share: of multiprocessing, of `mmap.mmap(-1, ...)`. As of now; about 1 ms."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for line in MAPS.read_text(errors="replace").splitlines():
            found = _LINE.match(line)
            if found is not None and found[3].endswith("s") and _is_memory(found[4]):
                self._starts.append(int(found[1], 16))
                self._ends.append(int(found[2], 16))

    def __contains__(self, address: int) -> bool:
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


def _is_memory(name: str) -> bool:
    """Not a file, which feeders map by its name, nor a batch of ours."""
    return (name.startswith(_NAMES) or "/pymp-" in name) and not name.startswith(_OURS)


def changed(address: int, nbytes: int) -> bool:
    """Whether a private mapping of a file was written to in this range."""
    within = False
    for line in SMAPS.read_text(errors="replace").splitlines():
        if (found := _LINE.match(line)) is not None:
            within = int(found[1], 16) < address + nbytes and address < int(found[2], 16)
        elif within and (dirty := _DIRTY.match(line)) is not None and dirty[1] != "0":
            return True
    return False
