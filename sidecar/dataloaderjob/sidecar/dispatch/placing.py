"""Places for batches in shared memory: regions, extents and leases. Pure.

The awaited ticket of each stream always gets a place: a free extent, the place of a ready batch that the trainer cannot
have reached, or a new memfd.

A region is one memfd. A *pool* region is divided into extents of any size. A *single* region holds one batch for which
the pool had no place, and is dropped together with that batch. The receiver creates and maps regions; this module only
keeps account of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from dataloaderjob.core.control import LEASES, PAGE
from dataloaderjob.sidecar.dispatch.instructions import CreateRegion, DropRegion, Instruction, Unpublish
from dataloaderjob.sidecar.dispatch.streams import Attempt, Extent, Stream, Ticket, TicketEvent, TicketState

RESERVE = 4
"""Number of batches, in addition to the window, for which the pool has room. The trainer is working on these batches,
or keeps them for a step or two."""
LEAST_WINDOW = 16
"""Minimum window for which the pool has room. With one or two workers, a trainer that keeps the batches of a few steps
would otherwise get copies."""


def turn(attempt: Attempt) -> int:
    """Returns the number of batches that the trainer takes before this one."""
    return attempt.ticket.number - attempt.ticket.stream.awaited


def round_up(nbytes: int) -> int:
    """Rounds a number of bytes up to whole pages, so that no page holds two batches."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


class Arena:
    """The free and used extents of one region. Allocation is best-fit, and adjacent free extents are merged."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used: dict[int, int] = {}
        self._free: list[tuple[int, int]] = [(0, nbytes)]

    @property
    def used_nbytes(self) -> int:
        return sum(self.used.values())

    def alloc(self, nbytes: int) -> int | None:
        """Claims `round_up(nbytes)` bytes. Returns their offset, or None if no free extent is large enough."""
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
        """Claims the extent at `offset`, for an adoption. Returns False if the extent is not free or is out of
        bounds."""
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
        """Frees the part of a used extent beyond `nbytes`. Returns the number of bytes that are kept."""
        keep = round_up(nbytes)
        size = self.used[offset]
        if keep < size:
            self.used[offset] = keep
            self._give(offset + keep, size - keep)
        return min(keep, size)

    def free(self, offset: int) -> None:
        """Frees the extent at `offset`. Raises KeyError if no used extent begins there."""
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
    """All regions of one pool, with one limit for their total size."""

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
        """Adds a new region of `nbytes` bytes and returns its number. The caller creates the memory."""
        self.adopt(self.last_region + 1, nbytes, single=single)
        return self.last_region

    def adopt(self, region: int, nbytes: int, *, single: bool) -> None:
        """Adds a region that a trainer gave back after this sidecar's predecessor died."""
        self.last_region = max(self.last_region, region)
        self.arenas[region] = Arena(nbytes)
        if single:
            self.singles.add(region)

    def alloc(self, nbytes: int) -> Extent | None:
        """Returns an extent in any pool region, or None if no free extent is large enough."""
        for region, arena in self.arenas.items():
            if region not in self.singles and (offset := arena.alloc(nbytes)) is not None:
                return Extent(region, offset, arena.used[offset])
        return None

    def trim(self, extent: Extent, nbytes: int) -> Extent:
        if extent.region in self.singles or round_up(nbytes) >= extent.nbytes:
            return extent
        return Extent(extent.region, extent.offset, self.arenas[extent.region].trim(extent.offset, nbytes))

    def free(self, extent: Extent) -> int | None:
        """Frees an extent. If its region is a single region, returns the number of that region, which the caller must
        drop."""
        arena = self.arenas[extent.region]
        arena.free(extent.offset)
        if extent.region in self.singles:
            self.singles.discard(extent.region)
            del self.arenas[extent.region]
            return extent.region
        return None


def mb(nbytes: int) -> str:
    """Formats a number of bytes for people."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 100_000 else f"{nbytes} bytes"


class Placer:
    """The space and the leases of one pool."""

    def __init__(self, limit_nbytes: int, pool_nbytes: int | None, out: list[Instruction]) -> None:
        self.space = Space(limit_nbytes)
        self.pool_nbytes = pool_nbytes
        self.drops = 0
        self.largest = 0
        self.lent: dict[int, tuple[Stream | None, int, Extent]] = {}
        """lease -> (stream, ticket number, extent); the stream is None for adopted leases."""
        self.highest_lease = -1
        self._free_leases: list[int] = []
        self._out = out

    # Regions

    def fit(self, streams: Iterable[Stream], nbytes: int) -> None:
        """Grows the pool, within the limit, to the size that the live streams need: (window + reserve) batches each."""
        self.largest = max(self.largest, nbytes)
        space = self.space
        if self.pool_nbytes is not None:
            need = self.pool_nbytes - space.pool_nbytes
        else:
            wanted = sum(
                (max(s.window, LEAST_WINDOW) + RESERVE) * round_up(s.size_hint)
                for s in streams
                if s.size_hint
            )
            need = wanted - space.pool_nbytes
            if space.pool_nbytes and need < wanted / 3:
                return
        left = space.limit_nbytes - space.total_nbytes
        room = left - round_up(self.largest)  # an awaited batch may need a memfd of its own
        if not space.pool_nbytes:
            room = max(room, min(round_up(nbytes), left))
        need = min(need, room) // round_up(nbytes) * round_up(nbytes)
        if need >= round_up(nbytes):
            region = space.add(need)
            self._out.append(CreateRegion(region, need, False, self.lease_limit))

    @property
    def lease_limit(self) -> int:
        """Number of bytes that the trainer may hold. The rest of the pool has room for two of the largest batches.

        If the limit has room for three such batches, the trainer may always hold two, because a loop keeps one batch
        while it takes the next. The batch in transit then gets a memfd of its own.
        """
        pool, one = self.space.pool_nbytes, round_up(self.largest)
        return max(pool - 2 * one, pool // 2, min(2 * one, self.space.limit_nbytes - one))

    # Extents

    def fits(self, nbytes: int) -> bool:
        return round_up(nbytes) <= self.space.limit_nbytes

    def room_for_awaited(
        self,
        nbytes: int,
        streams: Iterable[Stream],
        placed: Callable[[], list[Attempt]],
        drop: Callable[[Attempt], None],
    ) -> Extent:
        """Returns a place for an awaited batch. Drops ready batches that no trainer can have reached, then batches in
        transit. Creates a memfd if this does not free enough space.

        Call this if no free extent is large enough. `placed`: returns the attempts that have a place. `drop`: takes an
        attempt's place away.
        """
        for ready in self._droppable(streams):
            self._drop(ready)
            if (extent := self.space.alloc(nbytes)) is not None:
                return extent
        space = self.space
        while space.total_nbytes + round_up(nbytes) > space.limit_nbytes and (attempts := placed()):
            drop(max(attempts, key=turn))
            if (extent := space.alloc(nbytes)) is not None:
                return extent
        return self._single(nbytes)

    def _single(self, nbytes: int) -> Extent:
        """Returns a new memfd for one batch. This is the last resort, and may exceed the limit by that one batch."""
        region = self.space.add(round_up(nbytes), single=True)
        self._out.append(CreateRegion(region, round_up(nbytes), True, self.lease_limit))
        offset = self.space.arenas[region].alloc(nbytes)
        assert offset == 0  # noqa: S101  a new region fits the batch that it was made for
        return Extent(region, 0, round_up(nbytes))

    def _droppable(self, streams: Iterable[Stream]) -> list[Ticket]:
        """Returns ready tickets that come after a ticket without a result, those farthest from their turn first."""
        found = []
        for stream in streams:
            wall = stream.first_unpublished()
            found += [t for t in stream.tickets.values() if t.state is TicketState.READY and t.number > wall]
        return sorted(found, key=lambda t: t.number - t.stream.awaited, reverse=True)

    def _drop(self, ticket: Ticket) -> None:
        assert ticket.lease is not None  # noqa: S101  READY has a lease
        self._out.append(Unpublish(ticket.stream.id, ticket.number))
        self.end_lease(ticket.lease)
        ticket.lease = None
        ticket.move(TicketEvent.DROP)
        ticket.stream.enqueue(ticket)
        self.drops += 1

    def free(self, extent: Extent) -> None:
        if (region := self.space.free(extent)) is not None:
            self._out.append(DropRegion(region))

    # Leases

    def lease(self, ticket: Ticket, extent: Extent) -> int:
        lease = heappop(self._free_leases) if self._free_leases else self.highest_lease + 1
        assert lease < LEASES  # noqa: S101  ROWS x MOST_AHEAD tickets and MAX_LEASES held are fewer
        self.highest_lease = max(self.highest_lease, lease)
        self.lent[lease] = (ticket.stream, ticket.number, extent)
        return lease

    def end_lease(self, lease: int) -> bool:
        """Ends a lease and frees its extent. Returns False if no such lease exists; the number is untrusted input."""
        entry = self.lent.pop(lease, None)
        if entry is None:
            return False
        heappush(self._free_leases, lease)
        self.free(entry[2])
        return True

    def adopt(self, lease: int, extent: Extent) -> bool:
        """Adds a lease that outlived this sidecar's predecessor. Returns False if the lease or its extent is
        impossible."""
        arena = self.space.arenas.get(extent.region)
        if arena is None or lease in self.lent or not 0 <= lease < LEASES:
            return False
        if not arena.take(extent.offset, extent.nbytes):
            return False
        self.lent[lease] = (None, 0, Extent(extent.region, extent.offset, arena.used[extent.offset]))
        return True

    def adopted(self) -> None:
        """Ends the adoption. Unused lease numbers below the highest adopted one become free."""
        self.highest_lease = max(self.lent, default=-1)
        self._free_leases = [n for n in range(self.highest_lease + 1) if n not in self.lent]
