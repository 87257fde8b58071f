"""The connections of a feeder: one for each receiver, and those to its supervisor.

A receiver's connection is bytes in, bytes out, never blocks, and knows frames but not tickets. `Sender` puts onto them
what the feeder's machine instructs, and returns the connections to flush.

That to the supervisor says where the feeder serves; each blob that this node lacks has one of its own (`blobs`).
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from dataloaderjob.core import frames, sockets
from dataloaderjob.core.errors import ProtocolError
from dataloaderjob.core.frames import HEADER_NBYTES, Flag, Header, Kind
from dataloaderjob.core.processes import Backoff
from dataloaderjob.core.settings import FeederSettings, read_key
from dataloaderjob.feeder.blobs import connect_to_supervisor
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

log = logging.getLogger(__name__)

_BACKOFF = Backoff(0.1, 2.0)
TELL_AFTER_S = 3.0
DRAIN_POLL_S = 0.05
CHECKSUM = int(Flag.CHECKSUM)
"""A plain int: int & IntFlag costs 2 µs."""
_READ_NBYTES = 256 * 1024
MAX_OWED = 10_000
"""Control frames that wait for a receiver to read them."""
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
        self.armed = 0
        """Events of the socket that the loop waits for."""
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

    def _body_frame(self, task: Task) -> list[Buffer]:
        body: Body = task.body
        header = frames.pack_header(
            Kind.BODY, stream=task.stream, ticket=task.ticket, bundle=task.bundle,
            nbytes=task.nbytes, room=self._loads(), flags=task.flags & CHECKSUM, load=self._machine.load,
        )  # fmt: skip
        return [header, body.view]


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
        while True:
            if sockets.recv_message(sock).get("type") == "drain":
                while not self._idle():
                    time.sleep(DRAIN_POLL_S)
                sockets.send_message(sock, {"type": "drained"})
