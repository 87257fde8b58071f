"""The connections of a feeder: one for each receiver, and those to its supervisor.

A receiver's connection is bytes in, bytes out, never blocks, and knows frames but not tickets. `Sender` puts onto them
what the feeder's machine instructs, and returns the connections to flush.

That to the supervisor says where the feeder serves; each blob that this node lacks has one of its own (`blobs`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dataloaderjob.core import frames, sockets
from dataloaderjob.core.errors import ProtocolError, RemoteProtocolError
from dataloaderjob.core.frames import HEADER_NBYTES, Flag, Header, Kind
from dataloaderjob.core.processes import Backoff
from dataloaderjob.core.settings import FeederSettings, read_key
from dataloaderjob.core.supervision import Cause
from dataloaderjob.feeder.blobs import connect_to_supervisor
from dataloaderjob.feeder.channel import Body, SharedBuffer
from dataloaderjob.feeder.feeding import Feeding
from dataloaderjob.feeder.feeding_states import (
    Announce,
    Fail,
    Instruction,
    Lost,
    NeedBundle,
    Send,
    Task,
    Withdraw,
)

log = logging.getLogger(__name__)

_BACKOFF = Backoff(0.1, 2.0)
TELL_AFTER_S = 3.0
DRAIN_POLL_S = 0.05
_READ_NBYTES = 256 * 1024
SHARED_FROM_NBYTES = 128 * 1024
"""Smaller bodies are sent to receivers on this machine too, which is quicker than to say where they lie: 6,100 of
100 kB a second and not 5,100, but 4,300 of 300 kB and not 4,700."""
MAX_OWED = 10_000
"""Control frames that wait for a receiver to read them."""
Buffer = bytes | memoryview


class Outgoing:
    """One frame on its way: the buffers that are not out yet."""

    __slots__ = ("buffers", "done", "fd", "memory", "task")

    def __init__(
        self, buffers: Sequence[Buffer], task: Task | None, memory: SharedBuffer | None = None
    ) -> None:
        self.buffers: list[Buffer] = list(buffers)
        self.task = task
        self.memory = memory
        """Where the body lies, of a frame that says so in place of bringing it."""
        self.fd: int | None = None
        """A descriptor that goes along."""
        self.done: Callable[[], None] | None = None

    def push(self, sock: socket.socket) -> None:
        """Sends what the socket takes. Raises BlockingIOError when that is not all, OSError."""
        buffers = self.buffers
        while buffers:
            sent = sock.sendmsg(buffers) if self.fd is None else socket.send_fds(sock, buffers, [self.fd])
            self.fd = None
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = memoryview(buffers[0])[sent:]


class ReceiverConnection:
    """A connection after its handshake."""

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        *,
        on_start: Callable[[Task], None],
        on_sent: Callable[[Task], None],
    ) -> None:
        """`on_start` and `on_sent` are called for bodies; of one that is shared, the second once it is taken."""
        self.number = number
        self.is_here = sock.family == socket.AF_UNIX
        """The receiver is on this machine, and may be given memory."""
        self.sock = sock
        self.closed = False
        self.armed = 0
        """Events of the socket that the loop waits for."""
        self._on_start = on_start
        self._on_sent = on_sent
        self._control: deque[Outgoing] = deque()
        self._bodies: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._untaken: deque[Task] = deque()
        """Those whose bodies the receiver was told of, in that order."""
        self._mapped: dict[int, weakref.ref[SharedBuffer]] = {}
        """Buffers that the receiver has, by their number."""
        self._inbuf = bytearray()
        sock.setblocking(False)

    # Output

    def queue_control(self, *buffers: Buffer) -> None:
        """Control frames overtake bodies that have not begun."""
        self._control.append(Outgoing(buffers, None))

    def queue_body(self, task: Task, buffers: Sequence[Buffer], memory: SharedBuffer | None = None) -> None:
        """`memory`: where the body lies, if the frame only says so."""
        self._bodies.append(Outgoing(buffers, task, memory))

    def withdraw(self, task: Task) -> None:
        self._bodies = deque(out for out in self._bodies if out.task is not task)

    def when_sent(self, call: Callable[[], None]) -> None:
        """Calls it once the control frame that was queued last is out; never if the connection ends before."""
        if self._control:
            self._control[-1].done = call

    @property
    def events(self) -> int:
        """What there is to wait for. Of a receiver that takes no answers nothing more is read."""
        reading = select.EPOLLIN if len(self._control) < MAX_OWED else 0
        return reading | select.EPOLLRDHUP | (select.EPOLLOUT if self._current is not None else 0)

    def flush(self) -> bool:
        """Sends until there is nothing or no room. Returns False when the connection is broken."""
        try:
            while (current := self._current or self._next()) is not None:
                current.push(self.sock)
                self._current = None
                if current.task is not None:
                    if current.memory is None:
                        self._on_sent(current.task)
                    else:
                        self._untaken.append(current.task)
                elif current.done is not None:
                    current.done()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # the end, whoever else may have it
        self.sock.close()

    def _next(self) -> Outgoing | None:
        if self._control:
            self._current = self._control.popleft()
        elif self._bodies:
            self._current = self._bodies.popleft()
            if self._current.task is not None:
                self._on_start(self._current.task)
            memory = self._current.memory
            if memory is not None and memory.number not in self._mapped:
                self._mapped[memory.number] = weakref.ref(memory)
                self._current.fd = memory.fd
        return self._current

    # Shared memory

    def taken(self) -> None:
        """The receiver has the earliest of the bodies that it was told of. Raises RemoteProtocolError if there is
        none."""
        if not self._untaken:
            raise RemoteProtocolError("a batch is said to be taken, and none was to be")
        self._on_sent(self._untaken.popleft())

    def gone(self) -> list[int]:
        """Buffers that the receiver has and that no builder uses any more; each is told once."""
        gone = [number for number, memory in self._mapped.items() if memory() is None]
        for number in gone:
            del self._mapped[number]
        return gone

    # Input

    def read(self) -> bool:
        """Takes in what the socket has. Returns False at its end."""
        try:
            data = self.sock.recv(_READ_NBYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._inbuf += data
        return bool(data)

    def frames(self) -> Iterator[tuple[Header, bytes]]:
        """Whole frames taken in so far. Raises RemoteProtocolError."""
        buffer = self._inbuf
        at = 0
        try:
            while len(buffer) - at >= HEADER_NBYTES:
                header = frames.unpack_header(bytes(buffer[at : at + HEADER_NBYTES]), frames.FROM_RECEIVER)
                end = at + HEADER_NBYTES + header.nbytes
                if len(buffer) < end:
                    break
                payload = bytes(buffer[at + HEADER_NBYTES : end])
                at = end
                yield header, payload
        finally:
            del buffer[:at]


class Sender:
    """The connections of a feeder, by number."""

    def __init__(self, machine: Feeding, loads: Callable[[], int]) -> None:
        """`loads`: how often this feeder has loaded a bundle."""
        self.connections: dict[int, ReceiverConnection] = {}
        self._loads = loads
        self._machine = machine

    def perform(
        self, instructions: Iterable[Instruction], payload: bytes = b"", *, flags: int = 0, position: int = -1
    ) -> set[ReceiverConnection]:
        """`payload`: the packed failure of tickets that failed, or why they are lost, making sample `position`."""
        touched: set[ReceiverConnection] = set()
        for made in instructions:
            task = made.task
            connection = self.connections.get(task.receiver)
            if connection is None:
                continue
            if isinstance(made, Send):
                self._queue_body(connection, task)
            elif isinstance(made, Withdraw):
                connection.withdraw(task)
            elif isinstance(made, Announce):
                self.control(Kind.ANNOUNCE, task, room=task.nbytes)
            elif isinstance(made, Fail):
                self.control(Kind.FAILED, task, payload=payload, flags=flags)
            elif isinstance(made, Lost):
                self.control(Kind.LOST, task, payload=payload, room=position + 1, flags=flags)
            elif isinstance(made, NeedBundle):
                self.control(Kind.NEED_BUNDLE, task)
            touched.add(connection)
        return touched

    def control(
        self, kind: Kind, task: Task, *, room: int = 0, payload: bytes = b"", flags: int = 0
    ) -> set[ReceiverConnection]:
        """Queues any frame but BODY about `task`."""
        connection = self.connections.get(task.receiver)
        if connection is None:
            return set()
        header = frames.pack_header(
            kind, stream=task.stream, ticket=task.ticket, bundle=task.bundle,
            nbytes=len(payload), room=room, load=self._machine.load, flags=flags,
        )  # fmt: skip
        connection.queue_control(header + payload)
        return {connection}

    def confirm_cancelled(self, connection: ReceiverConnection, cancel: Header) -> None:
        """Queues the answer to a CANCEL frame."""
        header = frames.pack_header(
            Kind.CANCELLED, stream=cancel.stream, ticket=cancel.ticket,
            load=self._machine.load,
        )  # fmt: skip
        connection.queue_control(header)

    def unmap(self) -> set[ReceiverConnection]:
        """Queues what receivers are to be told of buffers that are of no further use."""
        touched: set[ReceiverConnection] = set()
        for connection in self.connections.values():
            for number in connection.gone():
                connection.queue_control(frames.pack_header(Kind.UNMAP, room=number, load=self._machine.load))
                touched.add(connection)
        return touched

    def _queue_body(self, connection: ReceiverConnection, task: Task) -> None:
        body: Body = task.body
        shares = connection.is_here and task.nbytes >= SHARED_FROM_NBYTES
        payload = frames.pack_shared(body.memory.number, task.nbytes) if shares else body.view
        header = frames.pack_header(
            Kind.SHARED if shares else Kind.BODY, stream=task.stream, ticket=task.ticket, bundle=task.bundle,
            nbytes=len(payload), room=self._loads(), flags=task.flags & Flag.CHECKSUM, load=self._machine.load,
        )  # fmt: skip
        connection.queue_body(task, [header, payload], body.memory if shares else None)


class Registration:
    """Runs in a thread of its own until the process ends.

    `idle` tells whether the server has nothing left to do, as a feeder that is drained has to wait for.
    """

    def __init__(
        self, settings: FeederSettings, *, host: str, port: int, instance: str, idle: Callable[[], bool]
    ) -> None:
        self._settings, self._idle = settings, idle
        self._key = read_key(settings.key_path)
        self._ready = {
            "type": "ready",
            "host": host,
            "port": port,
            "instance": instance,
            "pid": os.getpid(),
            "node": settings.node,
            "session": settings.session,
        }
        self._trouble: dict[str, Any] | None = None
        """The last one that has not been told yet."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def tell(self, cause: Cause, why: str) -> None:
        """Has the supervisor hear what is wrong here although the feeder serves; from any thread."""
        self._trouble = {"type": "trouble", "cause": cause.value, "why": why}
        os.eventfd_write(self._wake, 1)

    def start(self) -> None:
        threading.Thread(target=self._forever, name="dlj-registration", daemon=True).start()

    def _forever(self) -> None:
        failures = 0
        logged, lost = "", -math.inf
        while True:
            since = time.monotonic()
            try:
                with connect_to_supervisor(self._settings, self._key, "feeder") as sock:
                    sockets.send_message(sock, self._ready)
                    logged, lost = "", math.inf
                    self._listen(sock)
            except (OSError, ProtocolError) as exc:
                lost = min(lost, time.monotonic())
                # At the end of a run the supervisor goes first.
                if str(exc) != logged and time.monotonic() - lost >= TELL_AFTER_S:
                    logged = str(exc)
                    log.warning("%s has no supervisor, trying again: %s", self._settings.name, exc)
            was_up = time.monotonic() - since > _BACKOFF.last_s  # it was a connection for a while
            failures = 1 if was_up else failures + 1
            time.sleep(_BACKOFF.spread_s(failures))

    def _listen(self, sock: socket.socket) -> None:
        """Listens until the connection ends, which raises ConnectionError."""
        poll = select.poll()  # of descriptors of any number
        for fd in (sock.fileno(), self._wake):
            poll.register(fd, select.POLLIN)
        while True:
            if self._wake in [fd for fd, _ in poll.poll()]:
                os.eventfd_read(self._wake)
                trouble, self._trouble = self._trouble, None
                if trouble is not None:
                    sockets.send_message(sock, trouble)
                continue
            if sockets.recv_message(sock).get("type") == "drain":
                while not self._idle():
                    time.sleep(DRAIN_POLL_S)
                sockets.send_message(sock, {"type": "drained"})
