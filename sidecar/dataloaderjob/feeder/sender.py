"""Sends: the connection to one receiver, and the frames that the feeder's machine puts onto it.

A connection is bytes in, bytes out, never blocks, and knows frames but not tickets. `Sender` follows the machine's
instructions and returns the connections to flush.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from dataloaderjob.core import frames
from dataloaderjob.core.frames import HEADER_NBYTES, Flag, Header, Kind
from dataloaderjob.feeder.channel import Body
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

_READ_NBYTES = 256 * 1024

Buffer = bytes | memoryview


class Outgoing:
    """One frame on its way: the buffers that are not out yet."""

    __slots__ = ("buffers", "done", "task")

    def __init__(self, buffers: Sequence[Buffer], task: Task | None) -> None:
        self.buffers: list[Buffer] = list(buffers)
        self.task = task
        self.done: Callable[[], None] | None = None

    def push(self, sock: socket.socket) -> None:
        """Sends what the socket takes. Raises BlockingIOError when that is not all, OSError."""
        buffers = self.buffers
        while buffers:
            sent = sock.sendmsg(buffers)
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
        """`on_start` and `on_sent` are called for bodies."""
        self.number = number
        self.sock = sock
        self.closed = False
        self.armed = False
        """Whether the loop waits until the socket takes more."""
        self._on_start = on_start
        self._on_sent = on_sent
        self._control: deque[Outgoing] = deque()
        self._bodies: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._inbuf = bytearray()
        sock.setblocking(False)

    # Output

    def queue_control(self, *buffers: Buffer) -> None:
        """Control frames overtake bodies that have not begun."""
        self._control.append(Outgoing(buffers, None))

    def queue_body(self, task: Task, buffers: Sequence[Buffer]) -> None:
        self._bodies.append(Outgoing(buffers, task))

    def withdraw(self, task: Task) -> None:
        self._bodies = deque(out for out in self._bodies if out.task is not task)

    def when_sent(self, call: Callable[[], None]) -> None:
        """Calls it once the control frame that was queued last is out; never if the connection ends before."""
        if self._control:
            self._control[-1].done = call

    @property
    def pending(self) -> bool:
        """Whether the socket was full."""
        return self._current is not None

    def flush(self) -> bool:
        """Sends until there is nothing or no room. Returns False when the connection is broken."""
        try:
            while (current := self._current or self._next()) is not None:
                current.push(self.sock)
                self._current = None
                if current.task is not None:
                    self._on_sent(current.task)
                elif current.done is not None:
                    current.done()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.closed = True
        self.sock.close()

    def _next(self) -> Outgoing | None:
        if self._control:
            self._current = self._control.popleft()
        elif self._bodies:
            self._current = self._bodies.popleft()
            if self._current.task is not None:
                self._on_start(self._current.task)
        return self._current

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


CHECKSUM = int(Flag.CHECKSUM)
"""A plain int: int & IntFlag costs 2 µs."""


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
                connection.queue_body(task, self._body_frame(task))
            elif isinstance(made, Withdraw):
                connection.withdraw(task)
            elif isinstance(made, Announce):
                self.control(Kind.ANNOUNCE, task, room=task.nbytes)
            elif isinstance(made, Fail):
                self.control(Kind.FAILED, task, payload=payload, flags=flags)
            elif isinstance(made, Lost):
                self.control(Kind.LOST, task, payload=payload, room=position + 1)
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
            kind, generation=task.generation, stream=task.stream, ticket=task.ticket, bundle=task.bundle,
            nbytes=len(payload), room=room, load=self._machine.load, flags=flags,
        )  # fmt: skip
        connection.queue_control(header + payload)
        return {connection}

    def confirm_cancelled(self, connection: ReceiverConnection, cancel: Header) -> None:
        """Queues the answer to a CANCEL frame."""
        header = frames.pack_header(
            Kind.CANCELLED, generation=cancel.generation, stream=cancel.stream, ticket=cancel.ticket,
            load=self._machine.load,
        )  # fmt: skip
        connection.queue_control(header)

    def _body_frame(self, task: Task) -> list[Buffer]:
        body: Body = task.body
        header = frames.pack_header(
            Kind.BODY, generation=task.generation, stream=task.stream, ticket=task.ticket, bundle=task.bundle,
            nbytes=task.nbytes, room=self._loads(), flags=task.flags & CHECKSUM, load=self._machine.load, crc=body.crc,
        )  # fmt: skip
        return [header, body.view]
