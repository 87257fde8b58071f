"""The shared memory of a feeder on this machine. The receiver copies batches directly from it, not through a socket.

A feeder reuses a buffer once the receiver has confirmed the copy, or once the connection has ended. Therefore, the
receiver checks after each copy that the connection is still open. If it is not, the receiver discards the copy.
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
"""The unit of `st_blocks`, in bytes."""
_FDS_NBYTES = socket.CMSG_SPACE(_MOST_AT_ONCE * 4)
MOST_BUFFERS = 1024
"""Maximum number of buffers of one feeder. Each buffer takes a file descriptor in this process. A builder has three or
four buffers. For a slot that ranks share, it has one more for each batch that they may still request."""


def connect(instance: str) -> socket.socket | None:
    """Connects to a feeder in this network namespace, without a handshake. Returns None if no such feeder is found.
    Raises OSError if the feeder exists but cannot accept a connection now."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.connect(sockets.on_machine(instance))
    except BlockingIOError:
        sock.close()
        raise
    except (OSError, ValueError):  # the name that a supervisor gives it may be invalid
        sock.close()
        return None
    return sock


class SharedBodies:
    """The buffers that a feeder has shared over one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._fds: deque[int] = deque()
        self._buffers: dict[int, mmap.mmap] = {}
        self.is_refused = False
        """True if a buffer could not be mapped."""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLRDHUP)

    def receive_into(self, target: memoryview) -> int:
        """Works like `recv_into`, and keeps the file descriptors that arrive with the data. Raises BlockingIOError if
        nothing has arrived. Raises RemoteProtocolError if a file descriptor was lost, or if too many arrived without a
        batch."""
        n, ancillary, flags, _ = self._sock.recvmsg_into(
            [target], _FDS_NBYTES, sockets.DO_NOT_WAIT | sockets.CLOSE_ON_EXEC
        )
        self._fds.extend(sockets.descriptors(ancillary))
        if flags & sockets.TRUNCATED:  # the next descriptor would be mistaken for it
            self.is_refused = True
            raise RemoteProtocolError(
                "a file descriptor was lost: this process may have reached its limit on open files"
            )
        if len(self._fds) > _MOST_AT_ONCE:
            raise RemoteProtocolError("file descriptors arrived that belong to no batch")
        return n

    def body(self, number: int, nbytes: int) -> memoryview:
        """Returns the first `nbytes` bytes of a buffer. On first use, maps the buffer from the file descriptor that
        arrived with the message. Raises RemoteProtocolError, OSError."""
        found = self._buffers.get(number)
        if found is None:
            found = self._buffers[number] = self._map(number, nbytes)
        if nbytes > len(found):
            raise RemoteProtocolError(
                f"a peer claims that a batch of {nbytes} bytes is in a buffer of {len(found)} bytes"
            )
        return memoryview(found)[:nbytes]

    def _map(self, number: int, nbytes: int) -> mmap.mmap:
        self.is_refused = True
        if not self._fds:
            raise RemoteProtocolError(f"buffer {number} arrived without its file descriptor")
        if len(self._buffers) >= MOST_BUFFERS:
            raise RemoteProtocolError(f"more than {MOST_BUFFERS} buffers arrived, and none was released")
        fd = self._fds.popleft()
        try:
            if not sealed(fd):  # truncating mapped memory kills the process that reads it
                raise RemoteProtocolError(
                    f"the memory of buffer {number} must be sealed against resizing, but is not"
                )
            about = os.fstat(fd)
            if not 0 < nbytes <= min(about.st_size, about.st_blocks * _BLOCK_NBYTES):
                raise RemoteProtocolError(
                    f"a peer claims that a batch of {nbytes} bytes is in a buffer of {about.st_size} "
                    f"bytes, {about.st_blocks * _BLOCK_NBYTES} of them allocated"
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
        """True if the feeder has closed the connection, even if data is left to read. A fence orders earlier copies
        before this check."""
        fence_anywhere()
        return bool(self._poll.poll(0))

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        for number in list(self._buffers):
            self.unmap(number)
