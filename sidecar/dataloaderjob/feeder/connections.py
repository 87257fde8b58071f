"""The connections of a feeder: one for each receiver, and one to its supervisor.

A receiver's connection never blocks. It knows frames, but not tickets. `Sender` turns the instructions of the feeder's
state machine into queued frames, and returns the connections to flush.

Over the connection to the supervisor, the feeder reports its address.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataloaderjob.core import frames, keys, sockets
from dataloaderjob.core.errors import ProtocolError, RemoteProtocolError
from dataloaderjob.core.frames import HEADER_NBYTES, Flag, FrameKind, Header
from dataloaderjob.core.processes import Backoff
from dataloaderjob.core.seals import MAC_NBYTES, BrokenSeal, sealed_nbytes
from dataloaderjob.core.settings import FeederSettings, read_own_key
from dataloaderjob.core.sockets import Connection
from dataloaderjob.core.supervision import EXIT_LEASE_OVER, Cause, connect_as_feeder
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

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

log = logging.getLogger(__name__)

_BACKOFF = Backoff(0.1, 2.0)
TELL_AFTER_S = 3.0
DRAIN_POLL_S = 0.05
_READ_NBYTES = 256 * 1024
SHARED_FROM_NBYTES = 128 * 1024
"""Minimum size of a body that is shared with a receiver on this machine. Sending smaller bodies through the socket is
faster: 6,100 bodies of 100 kB per second, compared with 5,100. Sending larger ones is slower: 4,300 bodies of 300 kB
per second, compared with 4,700."""
MAX_OWED = 10_000
"""Number of waiting control frames at which the feeder stops reading from a receiver."""
Buffer = bytes | memoryview


class Outgoing:
    """The unsent buffers of a frame that is being sent."""

    __slots__ = ("buffers", "done", "fd", "memory", "task")

    def __init__(
        self, buffers: Sequence[Buffer], task: Task | None, memory: SharedBuffer | None = None
    ) -> None:
        self.buffers: list[Buffer] = list(buffers)
        self.task = task
        self.memory = memory
        """The buffer that holds the body, if the frame gives the body's location instead of its bytes."""
        self.fd: int | None = None
        """A file descriptor to send with the frame."""
        self.done: Callable[[], None] | None = None

    def push(self, sock: socket.socket) -> None:
        """Sends as much as the socket accepts. Raises BlockingIOError if anything is left. Raises OSError."""
        buffers = self.buffers
        while buffers:
            sent = sock.sendmsg(buffers) if self.fd is None else socket.send_fds(sock, buffers, [self.fd])
            self.fd = None
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if sent:
                buffers[0] = memoryview(buffers[0])[sent:]


class ReceiverConnection:
    """A receiver's connection after its handshake."""

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        *,
        on_start: Callable[[Task], None],
        on_sent: Callable[[Task], None],
    ) -> None:
        """`on_start` and `on_sent`: called for each body. For a shared body, `on_sent` is called once the receiver has
        taken it."""
        self.number = number
        self.is_here = sock.family == socket.AF_UNIX
        """True if the receiver is on this machine, so that bodies may be shared with it."""
        self.sock = sock
        self.closed = False
        self.armed = 0
        """Socket events that the loop waits for."""
        self._on_start = on_start
        self._on_sent = on_sent
        self._control: deque[Outgoing] = deque()
        self._bodies: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._untaken: deque[Task] = deque()
        """Tasks whose bodies were offered to the receiver as shared memory, in the order of the offers."""
        self._mapped: dict[int, weakref.ref[SharedBuffer]] = {}
        """Buffers that were shared with the receiver, by number."""
        self._inbuf = bytearray()
        self._seals = sockets.seals_of(sock)
        self._head_nbytes = sealed_nbytes(HEADER_NBYTES, self._seals)
        self._header: Header | None = None
        """The header of the frame whose payload has not arrived yet."""
        sock.setblocking(False)

    # Output

    def queue_control(self, header: bytes, payload: bytes = b"") -> None:
        """Queues a control frame, which overtakes bodies that are not being sent yet."""
        self._control.append(Outgoing((header, payload), None))

    def queue_body(self, task: Task, buffers: Sequence[Buffer], memory: SharedBuffer | None = None) -> None:
        """Queues a body. `memory`: the buffer that holds it, if the frame only gives its location."""
        self._bodies.append(Outgoing(buffers, task, memory))

    def withdraw(self, task: Task) -> None:
        self._bodies = deque(out for out in self._bodies if out.task is not task)

    def when_sent(self, call: Callable[[], None]) -> None:
        """Calls `call` once the last queued control frame is sent; never if the connection ends first."""
        if self._control:
            self._control[-1].done = call

    @property
    def events(self) -> int:
        """The socket events to wait for. Nothing more is read from a receiver that does not read its answers."""
        reading = select.EPOLLIN if len(self._control) < MAX_OWED else 0
        return reading | select.EPOLLRDHUP | (select.EPOLLOUT if self._current is not None else 0)

    def flush(self) -> bool:
        """Sends until nothing is left or the socket is full. Returns False if the connection is broken."""
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
            self.sock.shutdown(socket.SHUT_RDWR)  # ends it even if another process holds the file descriptor
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
        if self._seals is not None and (current := self._current) is not None:
            # Frames are sealed only now, because their seals cover the order of frames. They do not cover the bytes of
            # a body.
            header, payload = current.buffers
            seal, header = self._seals.out.seal, bytes(header)
            current.buffers = [seal(header, payload)] if current.task is None else [seal(header), payload]
        return self._current

    # Shared memory

    def taken(self) -> None:
        """Records that the receiver has taken the earliest of its shared bodies. Raises RemoteProtocolError if there is
        none."""
        if not self._untaken:
            raise RemoteProtocolError("a peer reports a batch as taken, but none was offered")
        self._on_sent(self._untaken.popleft())

    def gone(self) -> list[int]:
        """Returns the numbers of shared buffers that no builder uses any longer. Returns each number only once."""
        gone = [number for number, memory in self._mapped.items() if memory() is None]
        for number in gone:
            del self._mapped[number]
        return gone

    # Input

    def read(self) -> bool:
        """Reads the available bytes. Returns False at the end of the connection."""
        try:
            data = self.sock.recv(_READ_NBYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._inbuf += data
        return bool(data)

    def frames(self) -> Iterator[tuple[Header, bytes]]:
        """Yields the complete frames read so far. Raises RemoteProtocolError."""
        buffer, seals, head_nbytes = self._inbuf, self._seals, self._head_nbytes
        at = 0
        try:
            while True:
                if (header := self._header) is None:
                    if len(buffer) - at < head_nbytes:
                        break
                    head = bytes(buffer[at : at + head_nbytes])
                    if seals is not None:
                        seals.into.open_head(head)
                    header = self._header = frames.unpack_header(head, frames.FROM_RECEIVER)
                    at += head_nbytes
                end = at + header.nbytes
                mac_end = end if seals is None or not header.nbytes else end + MAC_NBYTES
                if len(buffer) < mac_end:
                    break
                payload = bytes(buffer[at:end])
                if seals is not None and payload:
                    seals.into.open_payload(payload, bytes(buffer[end:mac_end]))
                at, self._header = mac_end, None
                yield header, payload
        finally:
            del buffer[:at]


class Sender:
    """A feeder's connections to receivers, by number, and the frames to queue on them."""

    def __init__(self, machine: Feeding, loads: Callable[[], int]) -> None:
        """`loads` returns the number of bundles that this feeder has loaded."""
        self.connections: dict[int, ReceiverConnection] = {}
        self._loads = loads
        self._machine = machine

    def perform(
        self, instructions: Iterable[Instruction], payload: bytes = b"", *, flags: int = 0, position: int = -1
    ) -> set[ReceiverConnection]:
        """Queues the frames for these instructions. `payload`: the packed failure of failed tickets, or the reason why
        tickets were lost. `position`: the sample that was being made."""
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
                self.control(FrameKind.ANNOUNCE, task, room=task.nbytes)
            elif isinstance(made, Fail):
                self.control(FrameKind.FAILED, task, payload=payload, flags=flags)
            elif isinstance(made, Lost):
                how = payload[: frames.MAX_TEXT_NBYTES]
                self.control(FrameKind.LOST, task, payload=how, room=position + 1, flags=flags)
            elif isinstance(made, NeedBundle):
                self.control(FrameKind.NEED_BUNDLE, task)
            touched.add(connection)
        return touched

    def control(
        self, kind: FrameKind, task: Task, *, room: int = 0, payload: bytes = b"", flags: int = 0
    ) -> set[ReceiverConnection]:
        """Queues any frame except BODY about `task`."""
        connection = self.connections.get(task.receiver)
        if connection is None:
            return set()
        header = frames.pack_header(
            kind, stream=task.stream, ticket=task.ticket, bundle=task.bundle,
            nbytes=len(payload), room=room, load=self._machine.load, flags=flags,
        )  # fmt: skip
        connection.queue_control(header, payload)
        return {connection}

    def confirm_cancelled(self, connection: ReceiverConnection, cancel: Header) -> None:
        """Queues the answer to a CANCEL frame."""
        header = frames.pack_header(
            FrameKind.CANCELLED, stream=cancel.stream, ticket=cancel.ticket,
            load=self._machine.load,
        )  # fmt: skip
        connection.queue_control(header)

    def unmap(self) -> set[ReceiverConnection]:
        """Queues a frame for each buffer that a receiver no longer needs."""
        touched: set[ReceiverConnection] = set()
        for connection in self.connections.values():
            for number in connection.gone():
                connection.queue_control(
                    frames.pack_header(FrameKind.UNMAP, room=number, load=self._machine.load)
                )
                touched.add(connection)
        return touched

    def _queue_body(self, connection: ReceiverConnection, task: Task) -> None:
        body: Body = task.body
        shares = connection.is_here and task.nbytes >= SHARED_FROM_NBYTES
        payload = frames.pack_shared(body.memory.number, task.nbytes) if shares else body.view
        header = frames.pack_header(
            FrameKind.SHARED if shares else FrameKind.BODY, stream=task.stream, ticket=task.ticket, bundle=task.bundle,
            nbytes=len(payload), room=self._loads(), flags=task.flags & Flag.CHECKSUM, load=self._machine.load,
        )  # fmt: skip
        connection.queue_body(task, [header, payload], body.memory if shares else None)


class Registration:
    """The feeder's registration with the supervisor, which a separate thread maintains until the process exits.

    `idle`: returns True if the server has nothing left to do. A draining feeder waits for this.
    """

    def __init__(
        self, settings: FeederSettings, *, host: str, port: int, instance: str, link_key: bytes,
        idle: Callable[[], bool], tls: Credentials | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._idle, self._tls = settings, idle, tls
        self._ready = {
            "type": "ready",
            "host": host,
            "port": port,
            "instance": instance,
            "pid": os.getpid(),
            "node": settings.node,
            "session": settings.session,
            "link": keys.wrap(read_own_key(settings), link_key, instance),
        }
        self._untold: dict[str, dict[str, Any]] = {}
        """The latest message of each type that is not sent yet."""
        self._told_costs: Mapping[str, int] = {}
        self._alone_since = time.monotonic()
        """Start of the time without a supervisor."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def tell(self, cause: Cause, why: str) -> None:
        """Reports a problem to the supervisor while this feeder still serves. Safe to call from any thread."""
        self._tell({"type": "trouble", "cause": cause.value, "why": why})

    def tell_costs(self, costs: Mapping[str, int]) -> None:
        """Reports the costs of batches if any batch was built, or waited for its connection, since the last report."""
        if costs["built"] != self._told_costs.get("built", 0) or costs["sending"] != self._told_costs.get(
            "sending", 0
        ):
            self._told_costs = costs
            self._tell({"type": "costs", "costs": dict(costs)})

    def _tell(self, message: dict[str, Any]) -> None:
        self._untold[message["type"]] = message
        os.eventfd_write(self._wake, 1)

    def start(self) -> None:
        threading.Thread(target=self._forever, name="dlj-registration", daemon=True).start()

    def _forever(self) -> None:
        failures = 0
        logged, lost = "", -math.inf
        while True:
            since = time.monotonic()
            try:
                with connect_as_feeder(self._settings, self._tls) as sock:
                    sockets.send_message(sock, self._ready)
                    logged, lost = "", math.inf
                    self._alone_since = math.inf
                    self._listen(sock)
            except (OSError, ProtocolError) as exc:
                lost = min(lost, time.monotonic())
                self._alone_since = min(self._alone_since, time.monotonic())
                # At the end of a run, the supervisor exits first.
                broken = isinstance(exc, BrokenSeal)
                if str(exc) != logged and (broken or time.monotonic() - lost >= TELL_AFTER_S):
                    logged = str(exc)
                    log.warning("%s has no supervisor, trying again: %s", self._settings.name, exc)
            was_up = time.monotonic() - since > _BACKOFF.last_s  # the connection lasted for a while
            failures = 1 if was_up else failures + 1
            if self._settings.lease_s:
                self._end_if_alone()
            time.sleep(_BACKOFF.spread_s(failures))

    def _end_if_alone(self) -> None:
        if time.monotonic() - self._alone_since >= self._settings.lease_s:
            log.warning(
                "%s is exiting: its supervisor has been gone for %.0f s",
                self._settings.name,
                self._settings.lease_s,
            )
            logging.shutdown()
            os._exit(EXIT_LEASE_OVER)

    def _listen(self, sock: Connection) -> None:
        """Exchanges messages with the supervisor until the connection ends, and then raises ConnectionError."""
        poll = select.poll()  # unlike select(), accepts file descriptors of any size
        for fd in (sock.fileno(), self._wake):
            poll.register(fd, select.POLLIN)
        while True:
            if self._wake in [fd for fd, _ in poll.poll(0 if sock.buffered else None)]:
                os.eventfd_read(self._wake)
                for kind in list(self._untold):
                    sockets.send_message(sock, self._untold.pop(kind))
                continue
            if sockets.recv_message(sock).get("type") == "drain":
                while not self._idle():
                    time.sleep(DRAIN_POLL_S)
                sockets.send_message(sock, {"type": "drained"})
