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
from dataloaderjob.core.control import fence_anywhere, sealed
from dataloaderjob.core.errors import RemoteProtocolError

_MOST_AT_ONCE = 16
_BLOCK_NBYTES = 512
"""What `stat` counts in."""
_FDS_NBYTES = socket.CMSG_SPACE(_MOST_AT_ONCE * 4)
MOST_BUFFERS = 1024
"""Most that one feeder may bring, each of which takes a descriptor here. A builder has three or four, and of a slot
that ranks share as many as they may still ask for."""


def connect(instance: str) -> socket.socket | None:
    """A connection to a feeder of this network namespace, without its handshake; None where there is none.

    Raises OSError where there is one, and it cannot be had now.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.connect(sockets.on_machine(instance))
    except BlockingIOError:
        sock.close()
        raise
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
        self.is_refused = False
        """A buffer could not be mapped."""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLRDHUP)

    def receive_into(self, target: memoryview) -> int:
        """`recv_into`, with the descriptors that come along. Raises BlockingIOError, and RemoteProtocolError for
        descriptors that no message speaks of."""
        n, ancillary, flags, _ = self._sock.recvmsg_into(
            [target], _FDS_NBYTES, sockets.DO_NOT_WAIT | sockets.CLOSE_ON_EXEC
        )
        self._fds.extend(sockets.descriptors(ancillary))
        if flags & sockets.TRUNCATED:  # the next one would be taken for it
            self.is_refused = True
            raise RemoteProtocolError("a descriptor was lost: this process may have no more of them")
        if len(self._fds) > _MOST_AT_ONCE:
            raise RemoteProtocolError("descriptors came that belong to no batch")
        return n

    def body(self, number: int, nbytes: int) -> memoryview:
        """The first `nbytes` of a buffer; the first time, its descriptor has come with the message.

        Raises RemoteProtocolError, OSError.
        """
        found = self._buffers.get(number)
        if found is None:
            found = self._buffers[number] = self._map(number, nbytes)
        if nbytes > len(found):
            raise RemoteProtocolError(f"a batch of {nbytes} bytes is said to lie in a buffer of {len(found)}")
        return memoryview(found)[:nbytes]

    def _map(self, number: int, nbytes: int) -> mmap.mmap:
        self.is_refused = True
        if not self._fds:
            raise RemoteProtocolError(f"buffer {number} came without its descriptor")
        if len(self._buffers) >= MOST_BUFFERS:
            raise RemoteProtocolError(f"more than {MOST_BUFFERS} buffers came, none of which was given up")
        fd = self._fds.popleft()
        try:
            if not sealed(fd):  # what is cut off under a mapping ends the process that reads it
                raise RemoteProtocolError(f"buffer {number} is not memory that is sealed against resizing")
            about = os.fstat(fd)
            if not 0 < nbytes <= min(about.st_size, about.st_blocks * _BLOCK_NBYTES):
                raise RemoteProtocolError(
                    f"a batch of {nbytes} bytes is said to lie in a buffer of {about.st_size}, of which "
                    f"{about.st_blocks * _BLOCK_NBYTES} are there"
                )
            mapped = mmap.mmap(fd, about.st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.is_refused = False
        return mapped

    def unmap(self, number: int) -> None:
        if (found := self._buffers.pop(number, None)) is not None:
            found.close()

    @property
    def has_ended(self) -> bool:
        """Whether the feeder has closed the connection, also where more is to be read. What was copied before was read
        before."""
        fence_anywhere()
        return bool(self._poll.poll(0))

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        for number in list(self._buffers):
            self.unmap(number)
