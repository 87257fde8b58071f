"""Extents of the pool: who owns which bytes. Pure: no mapping, no descriptors.

A region is one memfd. A *pool* region is cut into extents of any size; a *single* region holds one batch
that had no place otherwise and goes with it. The receiver creates and maps regions; this module only
counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from dataloaderjob.core.control import PAGE


def round_up(nbytes: int) -> int:
    """Extents are whole pages, so that no page holds two batches."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


@dataclass(frozen=True, slots=True)
class Extent:
    """`nbytes` usable bytes (whole pages) at `offset` of a region."""

    region: int
    offset: int
    nbytes: int


class Arena:
    """Free and used extents of one region. Best fit, neighbours merged."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used: dict[int, int] = {}
        self._free: list[tuple[int, int]] = [(0, nbytes)]

    @property
    def used_nbytes(self) -> int:
        return sum(self.used.values())

    @property
    def largest_free(self) -> int:
        return max((n for _, n in self._free), default=0)

    def alloc(self, nbytes: int) -> int | None:
        """Returns the offset of `round_up(nbytes)` bytes, or None."""
        need = round_up(nbytes)
        best: tuple[int, int] | None = None
        for span in self._free:
            if span[1] >= need and (best is None or span[1] < best[1]):
                best = span
                if span[1] == need:
                    break
        if best is None:
            return None
        at = bisect_left(self._free, best)
        offset, size = best
        if size == need:
            del self._free[at]
        else:
            self._free[at] = (offset + need, size - need)
        self.used[offset] = need
        return offset

    def take(self, offset: int, nbytes: int) -> bool:
        """Claims an extent at a known place (adoption). False if it is not free or out of bounds."""
        need = round_up(nbytes)
        for at, (start, size) in enumerate(self._free):
            if offset % PAGE == 0 and start <= offset and offset + need <= start + size:
                del self._free[at]
                if start < offset:
                    insort(self._free, (start, offset - start))
                if offset + need < start + size:
                    insort(self._free, (offset + need, start + size - offset - need))
                self.used[offset] = need
                return True
        return False

    def trim(self, offset: int, nbytes: int) -> int:
        """Gives back what lies behind `nbytes` of a used extent; returns the size kept."""
        keep = round_up(nbytes)
        size = self.used[offset]
        if keep < size:
            self.used[offset] = keep
            self._give(offset + keep, size - keep)
        return min(keep, size)

    def free(self, offset: int) -> None:
        """Raises KeyError if nothing is used at `offset`."""
        self._give(offset, self.used.pop(offset))

    def _give(self, offset: int, size: int) -> None:
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            size += before
            at -= 1
        self._free.insert(at, (offset, size))


@dataclass
class Space:
    """All regions of one pool, under one limit in bytes."""

    limit_nbytes: int
    arenas: dict[int, Arena] = field(default_factory=dict)
    singles: set[int] = field(default_factory=set)
    last_region: int = 0

    @property
    def total_nbytes(self) -> int:
        return sum(a.nbytes for a in self.arenas.values())

    @property
    def pool_nbytes(self) -> int:
        return sum(a.nbytes for r, a in self.arenas.items() if r not in self.singles)

    @property
    def used_nbytes(self) -> int:
        return sum(a.used_nbytes for a in self.arenas.values())

    def add(self, nbytes: int, *, single: bool = False) -> int:
        """Enters a new region of `nbytes`; returns its number. The caller creates the memory."""
        self.last_region += 1
        self.arenas[self.last_region] = Arena(nbytes)
        if single:
            self.singles.add(self.last_region)
        return self.last_region

    def adopt(self, region: int, nbytes: int, *, single: bool) -> None:
        """Enters a region that a trainer gave back after this sidecar's predecessor died."""
        self.last_region = max(self.last_region, region)
        self.arenas[region] = Arena(nbytes)
        if single:
            self.singles.add(region)

    def alloc(self, nbytes: int) -> Extent | None:
        """An extent in any pool region, or None."""
        for region, arena in self.arenas.items():
            if region not in self.singles and (offset := arena.alloc(nbytes)) is not None:
                return Extent(region, offset, arena.used[offset])
        return None

    def trim(self, extent: Extent, nbytes: int) -> Extent:
        if extent.region in self.singles or round_up(nbytes) >= extent.nbytes:
            return extent
        return Extent(extent.region, extent.offset, self.arenas[extent.region].trim(extent.offset, nbytes))

    def free(self, extent: Extent) -> int | None:
        """Frees an extent. Returns the region when it is to be given back to the system: a single."""
        arena = self.arenas[extent.region]
        arena.free(extent.offset)
        if extent.region in self.singles:
            self.singles.discard(extent.region)
            del self.arenas[extent.region]
            return extent.region
        return None
