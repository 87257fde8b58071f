"""The trainer's side of the pool: mapped regions and leases.

A batch is lent to the trainer as one numpy array of bytes. Every tensor of the batch is a view of this array. A weak
reference to the array, the `Lease`, stores one byte in shared memory when the last view is garbage-collected. This may
happen in any thread, in any order, and needs no lock. It makes no system call unless the receiver waits for room.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaderjob.core.control import PAGE, W_WANT, Control, Entry, fence_anywhere, sealed
from dataloaderjob.core.errors import RemoteProtocolError

MAX_LEASES = 1_000
_U8 = np.dtype(np.uint8)

Bytes = npt.NDArray[np.uint8]


class Lease(weakref.ref[Bytes]):
    """A lease that ends when the bytes that it refers to are garbage-collected."""

    __slots__ = ("is_out", "number", "tail")

    is_out: bool
    """True if the user holds the batch; False if only the thread that forwards it does."""
    number: int
    tail: LeaseTail


class LeaseTail:
    """The state that changes when a lease ends. After a fork, the child's copy is cut off, so the child ends none of
    its parent's leases."""

    __slots__ = ("_fd", "_holds", "ended", "leases", "waiting", "words")

    def __init__(self, control: Control, wake_receiver: int, leases: Leases) -> None:
        """Takes ownership of the eventfd `wake_receiver`, which stays open while a lease may still end."""
        self.ended: memoryview | None = control.ended
        self.words = control.words
        self.leases = leases
        self._fd = wake_receiver
        self._holds = 0
        self.waiting: list[Lease] | None = None
        """Leases whose end is postponed until a fork is complete; None while no fork is in progress."""

    def hold(self) -> None:
        """Prevents leases from ending until `release` is called."""
        self._holds += 1
        if self.waiting is None:
            self.waiting = []

    def release(self) -> None:
        self._holds -= 1
        if not self._holds:
            ended, self.waiting = self.waiting or [], None
            for lease in ended:
                _end(lease)

    def wake(self) -> None:
        os.eventfd_write(self._fd, 1)

    def cut(self) -> None:
        """Prevents leases from ending from now on, except those that other threads are already ending."""
        self.ended = None
        self.leases.clear()

    def close(self, close: Callable[[int], None] = os.close) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)

    def __del__(self) -> None:
        self.close()


PoolPlace = tuple[int, int, int, Lease]
"""(region, offset, bytes of its extent, lease)."""
Leases = dict[int, PoolPlace]
"""Leases by number."""


def _end(lease: Lease, fence: Callable[[], None] = fence_anywhere, want: int = W_WANT) -> None:
    # Globals are passed as arguments. They may be gone if a batch lives until the interpreter shuts down.
    tail = lease.tail
    if (ended := tail.ended) is None:
        return
    if (waiting := tail.waiting) is not None:  # no call before the append: the list may be dropped
        waiting.append(lease)
        return
    number, leases = lease.number, tail.leases
    ended[number] = 1
    # The receiver may have reused the number already. No call here, so that no other thread runs in between.
    if number in leases and leases[number][3] is lease:
        del leases[number]
    fence()
    if tail.words[want]:
        tail.wake()


class Mapping(mmap.mmap):
    """A region's memory. It calls `before_unmap` before it is unmapped; a weak reference would react only
    afterwards."""

    is_claimed = False
    """True if devices may read the memory directly while a batch is sent to them. Users then get no views of it."""
    before_unmap: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.before_unmap is not None:
            self.before_unmap()


@dataclass(slots=True, eq=False)
class Region:
    """One mapped memfd of the pool."""

    number: int
    nbytes: int
    single: bool
    fd: int
    map: Mapping
    address: int

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Closes the file descriptor. The mapping ends with its last lease."""
        close(self.fd)


def map_region(number: int, nbytes: int, single: bool, fd: int) -> Region:
    """Maps a memfd that the sidecar sent. Raises RemoteProtocolError unless it is sealed at `nbytes` bytes, because
    access to a truncated memfd would raise SIGBUS."""
    if not sealed(fd) or os.fstat(fd).st_size != nbytes:
        os.close(fd)
        raise RemoteProtocolError(
            f"the sidecar sent a memfd for region {number} that is not sealed at {nbytes} bytes"
        )
    mapped = Mapping(fd, nbytes)
    address = int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
    return Region(number, nbytes, single, fd, mapped, address)


class Pool:
    """Regions and leases of one trainer process."""

    __slots__ = ("_widest", "copies", "lease_limit", "leases", "regions", "surely", "tail")

    def __init__(self, control: Control, wake_receiver: int) -> None:
        self.regions: dict[int, Region] = {}
        self.leases: Leases = {}
        """Leases that are not known to have ended. `_end` removes entries, in any thread."""
        self.lease_limit = 0
        self.surely = 0
        """Number of leases that cannot exceed the limit, whatever their sizes."""
        self._widest = 0
        self.copies = 0
        self.tail = LeaseTail(control, wake_receiver, self.leases)

    @property
    def leased_nbytes(self) -> int:
        return sum([size for _, _, size, _ in list(self.leases.values())])

    @property
    def over_limit(self) -> bool:
        """True if the trainer holds more than its limit. It is always False while `len(leases) <= surely`, which is
        faster to check."""
        return self.leased_nbytes > self.lease_limit or len(self.leases) > MAX_LEASES

    def add(self, region: Region, lease_limit: int) -> None:
        """Adds a region that the sidecar sent, with the new limit."""
        self.regions[region.number] = region
        self.limit(lease_limit)

    def limit(self, lease_limit: int) -> None:
        """Sets the number of bytes that may be under lease at once."""
        self.lease_limit = lease_limit
        self._widen(self._widest)

    def _widen(self, size: int) -> None:
        self._widest = size
        self.surely = min(MAX_LEASES, self.lease_limit // size) if size else 0

    def lend(self, number: int, region: Region, entry: Entry, *, is_out: bool = True) -> Bytes:
        """Lends the bytes of a ready batch to the user or, if not `is_out`, to the thread that forwards them. Raises
        RemoteProtocolError unless they lie within the region."""
        _, _, _, offset, nbytes = entry
        if offset + nbytes > region.nbytes:
            raise RemoteProtocolError(
                f"the sidecar published {nbytes} bytes at offset {offset} of a {region.nbytes}-byte region"
            )
        size = -(-nbytes // PAGE) * PAGE
        if size > self._widest:
            self._widen(size)
        lent = np.ndarray((nbytes,), _U8, region.map, offset)
        self.leases[number] = region.number, offset, size, self._lease(number, lent, is_out)
        return lent

    def _lease(self, number: int, lent: Bytes, is_out: bool) -> Lease:
        lease = Lease(lent, _end)
        lease.number, lease.tail, lease.is_out = number, self.tail, is_out
        return lease

    def give_back(self, number: int) -> None:
        """Ends the lease of a batch that cannot be used."""
        lent = np.empty(0, _U8)
        lease = self._lease(number, lent, False)
        del lent, lease

    def claim(self) -> list[Region]:
        """Claims regions for devices, except single-batch regions and those that a user has views of. Returns the newly
        claimed regions."""
        free = [each for each in self.regions.values() if not (each.single or each.map.is_claimed)]
        if free:
            out = {region for region, _, _, lease in list(self.leases.values()) if lease.is_out}
            free = [each for each in free if each.number not in out]
        for each in free:
            each.map.is_claimed = True
        return free

    def drop(self, number: int) -> None:
        """Releases a region; views of it stay valid."""
        region = self.regions.pop(number, None)
        if region is not None:
            region.close()

    def adoption(self) -> tuple[dict[str, Any], list[int]]:
        """Returns a description of the pool for a sidecar that takes it over, and the file descriptors of its
        regions."""
        self._drop_empty_singles()
        regions = list(self.regions.values())
        adopt = {
            "regions": [{"region": r.number, "nbytes": r.nbytes, "single": r.single} for r in regions],
            "leases": [[n, *place] for n, (*place, _) in self.leases.copy().items()],
        }
        return adopt, [region.fd for region in regions]

    def _drop_empty_singles(self) -> None:
        """Releases the single-batch regions whose batch is gone: a new sidecar has no use for them."""
        held = {region for region, *_ in list(self.leases.values())}
        for number in [r.number for r in self.regions.values() if r.single and r.number not in held]:
            self.drop(number)
