"""Memory of a feeder on this machine, out of which its batches are copied: one copy, and no socket between.

A feeder writes into a buffer again once the receiver has said that it has what lay there, or when the connection has
ended: its end is looked for after each copy, and what was copied then counts for nothing.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
from collections import deque

from dataloaderjob.core import sockets
from dataloaderjob.core.control import sealed
from dataloaderjob.core.errors import RemoteProtocolError

_MOST_AT_ONCE = 16
_FDS_NBYTES = socket.CMSG_SPACE(_MOST_AT_ONCE * 4)
MOST_BUFFERS = 512
"""Most that one feeder may bring, each of which takes a descriptor here: a builder has three or four."""


def connect(instance: str) -> socket.socket | None:
    """A connection to a feeder of this network namespace, without its handshake; None where there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.connect(sockets.on_machine(instance))
    except (OSError, ValueError):  # a supervisor may call it what is no name at all
        sock.close()
        return None
    return sock


class SharedBodies:
    """The buffers that one connection has brought."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._fds: deque[int] = deque()
        self._buffers: dict[int, mmap.mmap] = {}
        self._is_refused = False
        """A buffer could not be mapped."""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLRDHUP)

    def receive_into(self, target: memoryview) -> int:
        """`recv_into`, with the descriptors that come along. Raises BlockingIOError, and RemoteProtocolError for
        descriptors that no message speaks of."""
        n, ancillary, _, _ = self._sock.recvmsg_into(
            [target], _FDS_NBYTES, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
        self._fds.extend(sockets.descriptors(ancillary))
        if len(self._fds) > _MOST_AT_ONCE:
            raise RemoteProtocolError("descriptors came that belong to no batch")
        return n

    def body(self, number: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a buffer; the first time, its descriptor has come with the message.

        Raises RemoteProtocolError, OSError.
        """
        found = self._buffers.get(number)
        if found is None:
            found = self._buffers[number] = self._map(number)
        if nbytes > len(found):
            raise RemoteProtocolError(f"a batch of {nbytes} bytes is said to lie in a buffer of {len(found)}")
        return memoryview(found)[:nbytes]

    def _map(self, number: int) -> mmap.mmap:
        self._is_refused = True
        if not self._fds:  # there may be none left here
            raise RemoteProtocolError(f"buffer {number} came without its descriptor")
        if len(self._buffers) >= MOST_BUFFERS:
            raise RemoteProtocolError(f"more than {MOST_BUFFERS} buffers came, none of which was given up")
        fd = self._fds.popleft()
        try:
            if not sealed(fd):  # what is cut off under a mapping ends the process that reads it
                raise RemoteProtocolError(f"buffer {number} is not memory that is sealed against resizing")
            mapped = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._is_refused = False
        return mapped

    def unmap(self, number: int) -> None:
        if (found := self._buffers.pop(number, None)) is not None:
            found.close()

    @property
    def works(self) -> bool:
        """Whether batches come this way."""
        return bool(self._buffers) and not self._is_refused

    @property
    def has_ended(self) -> bool:
        """Whether the feeder has closed the connection, also where more is to be read."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        for number in list(self._buffers):
            self.unmap(number)
