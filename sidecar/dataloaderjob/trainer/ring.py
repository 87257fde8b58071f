"""The trainer's side of the ring: mapped regions and leases.

A batch is lent to the trainer as one numpy array of bytes, of which every tensor of the batch is a view. A weak
reference to it, the `Lease`, sees when the last of them is collected, wherever that happens, and stores one byte
in shared memory: any thread, any order, no lock, no system call unless the receiver waits for room.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaderjob.core.control import W_WANT, Control, Entry, sealed
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.fence import fence_anywhere
from dataloaderjob.core.space import PAGE

MADV_POPULATE_READ = 22
MAX_LEASES = 1_000
MAX_PLACES = 64
MADE_TOGETHER = 8
_ndarray: type[np.ndarray[Any, Any]] = np.ndarray
_U8 = np.dtype(np.uint8)

Bytes = npt.NDArray[np.uint8]


class Lease(weakref.ref[Bytes]):
    """Ends with the bytes that it refers to, if it was given its `tail`: when the batch counts as taken.

    Until then they may be dropped and lent again, for a KeyboardInterrupt may come anywhere within next().
    """

    __slots__ = ("number", "tail")

    number: int
    tail: LeaseTail | None


class LeaseTail:
    """What the end of a lease touches. After a fork the child's copy is cut off, so it ends no lease of its parent."""

    __slots__ = ("ended", "leases", "wake", "words")

    def __init__(self, control: Control, wake_receiver: int, leases: Leases) -> None:
        self.ended: memoryview | None = control.ended
        self.words = control.words
        self.leases = leases
        self.wake = partial(os.eventfd_write, wake_receiver, 1)

    def cut(self) -> None:
        self.ended = None


Leases = dict[int, tuple[int, int, int, Lease]]
"""(region, offset, bytes of its extent, lease), by the lease's number."""


Views = tuple[Bytes, Lease, list[Any]]
"""The bytes of one batch, a lease on them that has not begun, the leaves that are views of them."""


def make_views(region: Region, offset: int, nbytes: int, make: Callable[[Bytes], list[Any]]) -> Views:
    lent = _ndarray((nbytes,), _U8, region.map, offset)
    lease = Lease(lent, _end)
    lease.tail = None
    return lent, lease, make(lent)


class Spares:
    """Views of places where batches come again and again, several made at a time.

    The first tensor that a next() makes costs 40 µs where other work emptied the caches, each further one 1 to 3.
    """

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: dict[tuple[int, int, int], tuple[bytes, list[Views]]] = {}

    def views(
        self, region: Region, offset: int, nbytes: int, key: bytes, make: Callable[[Bytes], list[Any]]
    ) -> Views:
        """`key` stands for what `make` makes: leaves that do not depend on the bytes."""
        place = region.number, offset, nbytes
        kept = self._places.get(place)
        if kept is None or kept[0] != key:
            if len(self._places) >= MAX_PLACES:
                del self._places[next(iter(self._places))]
            self._places[place] = key, []
            return make_views(region, offset, nbytes, make)
        if not kept[1]:
            kept[1].extend([make_views(region, offset, nbytes, make) for _ in range(MADE_TOGETHER)])
        return kept[1].pop()

    def clear(self) -> None:
        self._places.clear()


def _end(lease: Lease) -> None:
    tail = lease.tail
    if tail is None or (ended := tail.ended) is None:
        return
    number = lease.number
    tail.leases.pop(number, None)  # first: once the receiver knows, it may use the number anew
    ended[number] = 1
    fence_anywhere()
    if tail.words[W_WANT]:
        tail.wake()


@dataclass(slots=True, eq=False)
class Region:
    """One mapped memfd of the ring."""

    number: int
    nbytes: int
    single: bool
    fd: int
    map: mmap.mmap
    address: int

    def close(self) -> None:
        """Closes the descriptor; the mapping goes with its last lease."""
        os.close(self.fd)


def map_region(number: int, nbytes: int, single: bool, fd: int) -> Region:
    """Maps a memfd that the sidecar sent. Raises RemoteProtocolError if it could be cut under us (SIGBUS)."""
    if not sealed(fd) or os.fstat(fd).st_size != nbytes:
        os.close(fd)
        raise RemoteProtocolError(
            f"the sidecar sent a memfd for region {number} that is not sealed at {nbytes} bytes"
        )
    mapped = mmap.mmap(fd, nbytes)
    address = int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
    return Region(number, nbytes, single, fd, mapped, address)


class Ring:
    """Regions and leases of one trainer process."""

    __slots__ = ("_widest", "copies", "lease_limit", "leases", "regions", "spares", "surely", "tail")

    def __init__(self, control: Control, wake_receiver: int) -> None:
        self.regions: dict[int, Region] = {}
        self.leases: Leases = {}
        """What is not known to have ended; `_end` takes entries out, in any thread."""
        self.lease_limit = 0
        self.surely = 0
        """So many leases are within the limit whatever their sizes."""
        self._widest = 0
        self.copies = 0
        self.tail = LeaseTail(control, wake_receiver, self.leases)
        self.spares = Spares()

    @property
    def leased_nbytes(self) -> int:
        return sum([size for _, _, size, _ in list(self.leases.values())])

    @property
    def over_limit(self) -> bool:
        """Whether the trainer holds more than it may. False without a look at each if `len(leases) <= surely`."""
        return self.leased_nbytes > self.lease_limit or len(self.leases) > MAX_LEASES

    def limit(self, lease_limit: int) -> None:
        """Bytes that may be under lease at once."""
        self.lease_limit = lease_limit
        self._widen(self._widest)

    def _widen(self, size: int) -> None:
        self._widest = size
        self.surely = min(MAX_LEASES, self.lease_limit // size) if size else 0

    def region(self, entry: Entry) -> Region:
        """Where a ready batch lies. Raises RemoteProtocolError if the entry does not lie within its region."""
        region = self.regions[entry[2]]
        if entry[3] + entry[4] > region.nbytes:
            raise RemoteProtocolError(
                f"the sidecar published {entry[4]} bytes at {entry[3]} of a region of {region.nbytes}"
            )
        return region

    def lend(self, number: int, entry: Entry, lease: Lease) -> None:
        """A ready batch is in the trainer's hands: it counts from here on, and ends once the lease has its `tail`."""
        _, _, region, offset, nbytes = entry
        lease.number = number
        size = -(-nbytes // PAGE) * PAGE
        if size > self._widest:
            self._widen(size)
        self.leases[number] = region, offset, size, lease

    def forget(self, number: int) -> None:
        """Takes back a lease that did not begin."""
        self.leases.pop(number, None)

    def drop(self, number: int) -> None:
        """Lets go of a region; views of it stay valid."""
        region = self.regions.pop(number, None)
        if region is not None:
            region.close()

    def drop_empty_singles(self) -> None:
        """Lets go of the regions for one batch whose batch is gone: a new sidecar has no use for them."""
        held = {region for region, *_ in list(self.leases.values())}
        for number in [r.number for r in self.regions.values() if r.single and r.number not in held]:
            self.drop(number)
