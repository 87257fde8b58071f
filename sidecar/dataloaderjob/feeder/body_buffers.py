"""The shared memory that a builder fills with batches, and from which the feeder sends them."""

from __future__ import annotations

import mmap
import os
from collections import deque

import numpy as np

from dataloaderjob.core.control import seal
from dataloaderjob.feeder.channel import Channel, MessageKind

SPARE_BUFFERS = 3
"""Number of free buffers to keep: those that a feeder may hold for one session, and one for the next batch."""
_ROUND_NBYTES = 64 * 1024
_LARGE_NBYTES = 64 * 1024


class Buffers:
    """Shared memory for bodies. The feeder reports which buffers have become free."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._maps: dict[int, mmap.mmap] = {}
        self._free: deque[int] = deque()
        self._last = 0

    def take(self, nbytes: int) -> tuple[int, memoryview]:
        """Returns a free buffer of at least `nbytes` bytes: (number, memory)."""
        for number in self._free:
            if nbytes <= len(self._maps[number]) <= 4 * nbytes + _ROUND_NBYTES:
                self._free.remove(number)
                return number, memoryview(self._maps[number])
        while len(self._free) >= SPARE_BUFFERS:
            self._drop(self._free.popleft())
        return self._create(nbytes)

    def view(self, number: int) -> memoryview:
        """Returns the memory of a buffer that was taken."""
        return memoryview(self._maps[number])

    def free(self, number: int) -> None:
        self._free.append(number)
        while len(self._free) > SPARE_BUFFERS:
            self._drop(self._free.popleft())

    def _create(self, nbytes: int) -> tuple[int, memoryview]:
        # An eighth more, because the sizes of batches may differ a little.
        size = -(-(nbytes + nbytes // 8) // _ROUND_NBYTES) * _ROUND_NBYTES
        self._last += 1
        fd = os.memfd_create("dlj-body", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            made = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            seal(fd, is_written_here=True)
            self._channel.send(MessageKind.BUFFER, a=self._last, b=size, fd=fd)
        finally:
            os.close(fd)
        self._maps[self._last] = made
        return self._last, memoryview(made)

    def _drop(self, number: int) -> None:
        self._maps.pop(number).close()
        self._channel.send(MessageKind.DROP, a=number)


def copy(to: memoryview, part: bytes | memoryview) -> None:
    """Copies a part of a body. A large part is copied without the GIL, so that threads of user code, such as Ray
    Data's, do not wait."""
    if len(part) < _LARGE_NBYTES:
        to[:] = part
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(part, np.uint8))
