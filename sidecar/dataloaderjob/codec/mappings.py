"""Memory that this process shares with others, or has changed, as the kernel tells (proc(5))."""

from __future__ import annotations

import bisect
import re
from pathlib import Path

MAPS, SMAPS = Path("/proc/self/maps"), Path("/proc/self/smaps")
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \S+ *(.*)")
_DIRTY = re.compile(r"Private_Dirty: +([0-9]+) kB")
_NAMES = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # noqa: S108  nothing is made there
_OURS = "/memfd:dlj-"


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
