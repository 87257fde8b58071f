"""The trainer's side of the ring: mapped regions and leases.

A batch is lent to the trainer as one numpy array of bytes, a `Lease`. Every tensor of the batch is a view
of it, so the lease ends when the last of them is collected, wherever that happens. Its finalizer stores
one byte in shared memory: any thread, any order, no lock, no system call.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dataloaderjob.core.control import W_WANT, Control, Entry, sealed
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.fence import fence_anywhere
from dataloaderjob.core.space import PAGE

MADV_POPULATE_READ = 22
MAX_LEASES = 1_000
_U8 = np.dtype(np.uint8)


class Lease(npt.NDArray[np.uint8] if TYPE_CHECKING else np.ndarray):  # type: ignore[misc]
    """The bytes of one batch in the trainer's hands, shape (bytes,): an array over the ring's mapping.

    It ends with its last reference, if it was given its `tail`: when the batch counts as taken. Until then
    it may be dropped and made again, for a KeyboardInterrupt may come anywhere within next().
    """

    __slots__ = ("number", "tail")

    number: int
    tail: LeaseTail

    def __del__(self) -> None:
        try:
            tail = self.tail
        except AttributeError:
            return  # a slice of it, or it was not begun
        ended = tail.ended
        if ended is not None:
            tail.log.append(self.number)
            ended[self.number] = 1
            fence_anywhere()
            if tail.words[W_WANT]:
                tail.wake()


class LeaseTail:
    """What a finalizer touches. After a fork the child's copy is cut off, so it ends no lease of its parent."""

    __slots__ = ("ended", "log", "wake", "words")

    def __init__(self, control: Control, wake_receiver: int) -> None:
        self.ended: memoryview | None = control.ended
        self.words = control.words
        self.wake = partial(os.eventfd_write, wake_receiver, 1)
        self.log: deque[int] = deque()

    def cut(self) -> None:
        self.ended = None


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

    __slots__ = ("copies", "lease_limit", "leased_nbytes", "leases", "regions", "tail")

    def __init__(self, control: Control, wake_receiver: int) -> None:
        self.regions: dict[int, Region] = {}
        self.leases: dict[int, tuple[int, int, int]] = {}
        """lease -> (region, offset, bytes of its extent) of what is not yet known to have ended."""
        self.leased_nbytes = 0
        self.lease_limit = 0
        self.copies = 0
        self.tail = LeaseTail(control, wake_receiver)

    def settle(self) -> None:
        """Takes note of the leases that have ended."""
        log = self.tail.log
        while log:
            number = log[0]
            entry = self.leases.get(number)
            if entry is not None:
                # No call between these two, so that no signal's handler runs there.
                del self.leases[number]
                self.leased_nbytes -= entry[2]
            log.popleft()

    def lend(self, number: int, entry: Entry) -> Lease:
        """A lease on a ready batch. It counts from here on, and ends once it has its `tail`.

        Raises RemoteProtocolError if the entry does not lie within its region.
        """
        if self.tail.log:
            self.settle()  # first: the number may be that of a lease that has ended, used anew
        _, _, region_number, offset, nbytes = entry
        region = self.regions[region_number]
        if offset + nbytes > region.nbytes:
            raise RemoteProtocolError(
                f"the sidecar published {nbytes} bytes at {offset} of a region of {region.nbytes}"
            )
        lease = Lease((nbytes,), _U8, region.map, offset)
        lease.number = number
        size, before = -(-nbytes // PAGE) * PAGE, self.leases.get(number)
        # No call from here on, as above.
        if before is not None:
            self.leased_nbytes -= before[2]  # an interrupt came before it was used
        self.leases[number] = (region_number, offset, size)
        self.leased_nbytes += size
        return lease

    def drop(self, number: int) -> None:
        """Lets go of a region; views of it stay valid."""
        region = self.regions.pop(number, None)
        if region is not None:
            region.close()

    def drop_empty_singles(self) -> None:
        """Lets go of the regions for one batch whose batch is gone: a new sidecar has no use for them."""
        held = {region for region, _, _ in self.leases.values()}
        for number in [r.number for r in self.regions.values() if r.single and r.number not in held]:
            self.drop(number)
