"""One connection to a receiver: bytes in, bytes out, never blocking. Knows frames, not tickets.

Any thread may flush; the one that finds the output free owns it until it is empty or the socket is full.
The lock is the server's; the socket is written without it, so that a large body does not keep tickets
from coming in.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from dataloaderjob.core import frames
from dataloaderjob.core.feeding_states import Job
from dataloaderjob.core.frames import HEADER_NBYTES, Header

_READ_NBYTES = 256 * 1024
_IOV_MAX = 1024

Buffer = bytes | memoryview


def checksum(buffers: Iterable[Buffer]) -> int:
    """crc32 of the buffers in a row."""
    crc = 0
    for buffer in buffers:
        crc = zlib.crc32(buffer, crc)
    return crc


class Outgoing:
    """One frame on its way: the buffers that are not out yet."""

    __slots__ = ("at", "buffers", "job")

    def __init__(self, buffers: Sequence[Buffer], job: Job | None) -> None:
        self.buffers: list[Buffer] = list(buffers)
        self.at = 0
        self.job = job

    def push(self, sock: socket.socket) -> bool:
        """Sends what the socket takes. Returns whether all is out; raises BlockingIOError, OSError."""
        buffers = self.buffers
        while self.at < len(buffers):
            sent = sock.sendmsg(buffers[self.at : self.at + _IOV_MAX])
            while self.at < len(buffers) and sent >= len(buffers[self.at]):
                sent -= len(buffers[self.at])
                buffers[self.at] = b""  # what is out need not be kept
                self.at += 1
            if sent:
                buffers[self.at] = memoryview(buffers[self.at])[sent:]
        return True


class Link:
    """A connection after its handshake."""

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        *,
        lock: threading.Lock,
        on_start: Callable[[Job], None],
        on_sent: Callable[[Job], None],
    ) -> None:
        """`on_start` and `on_sent` are called under the lock, for bodies."""
        self.number = number
        self.sock = sock
        self.closed = False
        self._lock = lock
        self._on_start = on_start
        self._on_sent = on_sent
        self._control: deque[Outgoing] = deque()
        self._bodies: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._owned = False
        self._again = False
        self._inbuf = bytearray()
        sock.setblocking(False)

    # Output; the lock is held for queue_*, withdraw and empty

    def queue_control(self, *buffers: Buffer) -> None:
        """Control frames overtake bodies that have not begun."""
        self._control.append(Outgoing(buffers, None))

    def queue_body(self, job: Job, buffers: Sequence[Buffer]) -> None:
        self._bodies.append(Outgoing(buffers, job))

    def withdraw(self, job: Job) -> None:
        self._bodies = deque(out for out in self._bodies if out.job is not job)

    @property
    def told(self) -> bool:
        """Whether every control frame is out."""
        return not self._control and (self._current is None or self._current.job is not None)

    def flush(self) -> bool:
        """Sends until there is nothing or no room. Returns False when the link is broken."""
        with self._lock:
            if self._owned:
                self._again = True
                return True
            self._owned = True
        try:
            while self._step():
                pass
        except OSError:
            with self._lock:
                self._give_up()
            return False
        return True

    def close(self) -> None:
        """Safe while another thread sends: that one then closes the descriptor."""
        with self._lock:
            self.closed = True
            if self._owned:
                self.shutdown()
            else:
                self.sock.close()

    def shutdown(self) -> None:
        """Ends the link; the I/O thread is told by the socket and closes it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _give_up(self) -> None:
        self._owned = False
        if self.closed:
            self.sock.close()

    def _step(self) -> bool:
        """One frame, or a part of one. Returns False, the output given up, when nothing more can go now."""
        with self._lock:
            current = self._current or self._next()
            self._again = False
            if current is None:
                self._give_up()
                return False
        try:
            current.push(self.sock)
        except BlockingIOError:
            with self._lock:
                if not self._again:  # else it became writable since, and that event found the output owned
                    self._give_up()
                return self._again
        with self._lock:
            self._current = None
            if current.job is not None:
                self._on_sent(current.job)
        return True

    def _next(self) -> Outgoing | None:
        if self._control:
            self._current = self._control.popleft()
        elif self._bodies and not self.closed:
            self._current = self._bodies.popleft()
            if self._current.job is not None:
                self._on_start(self._current.job)
        return self._current

    # Input; the I/O thread only

    def read(self, *, to_end: bool) -> bool:
        """Takes in what the socket has. Returns False at its end.

        Edge-triggered: a short read means that more bytes make a new edge, unless the edge that brought us
        here already said that the peer has ended (`to_end`).
        """
        while True:
            try:
                data = self.sock.recv(_READ_NBYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._inbuf += data
            if len(data) < _READ_NBYTES and not to_end:
                return True

    def frames(self) -> Iterator[tuple[Header, bytes]]:
        """Whole frames taken in so far. Raises RemoteProtocolError."""
        buffer = self._inbuf
        at = 0
        try:
            while len(buffer) - at >= HEADER_NBYTES:
                header = frames.unpack(bytes(buffer[at : at + HEADER_NBYTES]), frames.FROM_RECEIVER)
                end = at + HEADER_NBYTES + header.nbytes
                if len(buffer) < end:
                    break
                payload = bytes(buffer[at + HEADER_NBYTES : end])
                at = end
                yield header, payload
        finally:
            del buffer[:at]
