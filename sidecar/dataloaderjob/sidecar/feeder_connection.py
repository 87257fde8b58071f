"""The connection to one feeder: the handshake and the transfer of frames. Bodies are received straight into the pool.

The socket is blocking, but all calls except one use MSG_DONTWAIT. The exception is the call that receives bodies. It
uses MSG_WAITALL with a timeout of 20 ms. This was the cheapest method that was measured: 0.20 CPU-s/GB, compared with
0.22 to 0.26 for non-blocking calls with SO_RCVLOWAT.

Waiting for a slow feeder would delay all other connections. Therefore, a body is late if less than half of it arrives
within the 20 ms, or if it arrives more slowly than QUICK. The next bodies of this connection are then received without
waiting. Their number doubles with each late body, until an awaited body is not late.

The connection to a feeder on this machine is a Unix socket, and bodies are copied from the feeder's memory
(`shared_bodies`).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from dataloaderjob.core import digests, frames, sockets
from dataloaderjob.core.errors import AuthError, ProtocolError, RemoteProtocolError
from dataloaderjob.core.frames import FROM_FEEDER, HEADER_NBYTES, Flag, FrameKind, Header
from dataloaderjob.core.handshake import DATA, HANDSHAKE_TIMEOUT_S, MAX_HELLO_NBYTES, ClientHandshake
from dataloaderjob.core.keys import Part
from dataloaderjob.core.opening import prover
from dataloaderjob.core.processes import Backoff
from dataloaderjob.core.seals import MAC_NBYTES, Seals, sealed_nbytes
from dataloaderjob.core.sockets import Connection
from dataloaderjob.sidecar import shared_bodies
from dataloaderjob.sidecar.dispatch.streams import Endpoint
from dataloaderjob.sidecar.shared_bodies import SharedBodies

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

SCRATCH_NBYTES = 16 * 1024
MAX_UNSENT_NBYTES = 16 * 1024 * 1024
"""Number of unsent bytes above which nothing more is read from a feeder. A single ticket may be larger."""
_IN, _OUT, _IN_OUT = select.EPOLLIN, select.EPOLLOUT, select.EPOLLIN | select.EPOLLOUT
DISCARD_NBYTES = 256 * 1024
WAITALL_ABOVE_NBYTES = 8 * 1024
BODY_WAIT_S = 0.02
INSTANT_S = 0.001
QUICK = 250e6
"""Minimum rate, in bytes per second, of a feeder whose bodies the receiver waits for. If it waited for slower feeders,
they would delay each other: 16 feeders that send 20 MB/s attained 0.65 of that rate."""
LOW_WATER_NBYTES = 256 * 1024
AHEAD_NBYTES = 17 * 1024
"""Maximum number of a body's bytes that TLS has read ahead, as part of a record. The socket does not deliver them
again."""
MAX_UNAWAITED = 512
"""Maximum number of a slow feeder's bodies between two awaited ones. With 16 such feeders at 10 bodies/s, the receiver
spends 1% of the time waiting."""
MAX_NOT_GREETED = 3
"""Number of failed handshakes over the Unix socket after which TCP is tried."""
BACKOFF = Backoff(0.1, 5.0)
TELL_EVERY_S = 60.0
"""Minimum interval between identical log lines about a peer that has broken the protocol."""
LinkError = (OSError, ProtocolError)
"""Errors that end a connection and have no other effect."""


class BodyPhase(Enum):
    CONNECTING = "connecting"
    HANDSHAKE = "in the handshake"
    UP = "up"
    DOWN = "down"


class Sink(Protocol):
    """A handler of a connection's events."""

    def connection_up(self, connection: FeederConnection, facts: dict[str, Any]) -> None: ...
    def connection_frame(self, connection: FeederConnection, header: Header, payload: bytes) -> None: ...
    def connection_body(self, connection: FeederConnection, header: Header) -> memoryview | None: ...
    def connection_body_done(self, connection: FeederConnection, header: Header, digest: int) -> None: ...
    def connection_moved(self, connection: FeederConnection) -> None: ...


class FeederConnection:
    """The connection to one feeder process, including reconnections."""

    def __init__(
        self, endpoint: Endpoint, sink: Sink, *, key: bytes, job: str, name: str, trainer: str = "",
        tls: Credentials | None = None,
    ) -> None:  # fmt: skip
        """`trainer`: the trainer process's name. A new name makes the feeder end unused sessions. `tls`: this process's
        certificates, if connections over TCP need TLS."""
        self.endpoint = endpoint
        self.phase = BodyPhase.DOWN
        self.sock: socket.socket | None = None
        self.retry_at = 0.0
        self.started_at = 0.0
        self._failures = 0
        self._sink, self._tls = sink, tls
        self._key, self._job, self._name, self._trainer = key, job, name, trainer
        self._shared: SharedBodies | None = None
        """The feeder's shared memory, if the feeder is on this machine."""
        self.over_tcp = False
        """True if the feeder is on this machine, but cannot share its memory."""
        self._not_greeted = 0
        """Number of consecutive connections over the Unix socket that ended before the handshake was complete."""
        self._out = bytearray()
        self._handshake: ClientHandshake
        self._seals: Seals | None = None
        """The seals of frames. Frames over a Unix socket have none."""
        self._head_nbytes = HEADER_NBYTES
        self._scratch = memoryview(bytearray(SCRATCH_NBYTES))
        self._have = 0
        self._header: Header | None = None
        self._target: memoryview | None = None
        self._control: bytearray | None = None
        self._left = 0
        self._filled = 0
        self._slow = False
        """True if the rest of the current body is received as it arrives, without waiting."""
        self._low_water = False
        """True if SO_RCVLOWAT is set for the rest of the current body."""
        self._unawaited = 0
        """Number of upcoming bodies for which the receiver does not wait."""
        self.told, self.tell_at = "", 0.0
        """The last log line about a broken protocol, and the earliest time at which it may be repeated."""
        self._late = 0
        """Number of consecutive awaited bodies that were late."""

    # Connecting

    def connect(self, now: float) -> None:
        """Starts connecting; `on_ready` does the rest. Raises OSError, TypeError or ValueError if the address is
        unusable."""
        here = None if self.over_tcp else shared_bodies.connect(self.endpoint.instance)
        family = sockets.family_of(self.endpoint.host)
        sock = here or socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        self._shared = None if here is None else SharedBodies(here)
        self.sock, self.phase, self.started_at = sock, BodyPhase.CONNECTING, now
        facts = {"trainer": self._trainer}
        self._handshake = ClientHandshake(
            self._link_key(), role="receiver", name=self._name, job=self._job, facts=facts, versions=DATA,
            transport=sockets.TLS if here is None and self._tls is not None else sockets.transport_of(sock),
        )  # fmt: skip
        if here is None:
            with contextlib.suppress(BlockingIOError):
                sock.connect((self.endpoint.host, self.endpoint.port))

    def give_up(self, now: float) -> None:
        """Closes the connection and sets the time of the next attempt."""
        if self._shared is not None:
            self._not_greeted = 0 if self.phase is BodyPhase.UP else self._not_greeted + 1
            self.over_tcp = self._shared.is_refused or self._not_greeted >= MAX_NOT_GREETED
        self.close()
        self._failures += 1
        self.retry_at = now + BACKOFF.spread_s(self._failures)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        self.sock, self.phase = None, BodyPhase.DOWN
        self._out.clear()
        self._have, self._header, self._target, self._control = 0, None, None, None
        self._left, self._filled = 0, 0  # the next connection begins with a frame
        self._slow, self._low_water, self._unawaited, self._late = False, False, 0, 0

    def handshake_late(self, now: float) -> bool:
        return (
            self.phase not in (BodyPhase.UP, BodyPhase.DOWN) and now - self.started_at > HANDSHAKE_TIMEOUT_S
        )

    @property
    def partial(self) -> bool:
        """True if epoll reports the rest of a body only once much of it has arrived."""
        return self._low_water

    @property
    def interest(self) -> int:
        """The epoll mask of the events to wait for. While too many bytes are unsent, nothing is read from the feeder,
        because its frames may need further answers."""
        if not self._out:
            return _IN_OUT if self.phase is BodyPhase.CONNECTING else _IN
        return _IN_OUT if len(self._out) <= MAX_UNSENT_NBYTES else _OUT

    # Events

    def on_ready(self, mask: int) -> None:
        """Handles socket events. Raises OSError or ProtocolError if the connection must be given up."""
        assert self.sock is not None  # noqa: S101  only open connections are polled
        if self.phase is BodyPhase.CONNECTING:
            if error := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, f"connecting to {self.endpoint.name} failed")
            self.phase = BodyPhase.HANDSHAKE
            if self._tls is not None and self._shared is None:
                self._begin_tls(self._tls)
        if self._out and mask & select.EPOLLOUT:
            self.flush()
        if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            if self.phase is BodyPhase.UP:
                self._receive()
            else:
                self._greet()
            self._receive_buffered()

    def _link_key(self) -> bytes:
        """Returns the feeder's link key, or the sidecar's own key if the feeder has no link key."""
        return bytes.fromhex(self.endpoint.link) or self._key

    def _begin_tls(self, tls: Credentials) -> None:
        """Wraps the socket in TLS, which begins once the feeder's challenge has arrived."""
        assert self.sock is not None  # noqa: S101
        prove = prover(self._link_key(), role="receiver", name=self._name, protocol=DATA.newest)
        self.sock = sock = tls.connected(self.sock, Part.FEEDER, prove)
        sock.patience_s = BODY_WAIT_S
        with contextlib.suppress(BlockingIOError):
            sock.establish()

    def _receive_buffered(self) -> None:
        """Handles bytes that TLS has already read from the socket, because epoll does not report them."""
        while self.phase is BodyPhase.UP and isinstance(self.sock, Connection) and self.sock.buffered:
            self._receive()

    def send(self, header: bytes, payload: bytes) -> None:
        """Queues a frame; `flush` sends all queued frames in one call."""
        if self.phase is not BodyPhase.UP:
            return  # the connection has broken; everything requested here is requested again
        if self._seals is not None:
            self._out += self._seals.out.seal(header, payload)
            return
        self._out += header
        self._out += payload

    def flush(self) -> None:
        if self.sock is None or not self._out:
            return
        with contextlib.suppress(BlockingIOError):
            sent = self.sock.send(self._out, socket.MSG_DONTWAIT)
            del self._out[:sent]

    # Handshake, without ever blocking

    def _greet(self) -> None:
        assert self.sock is not None  # noqa: S101
        try:
            data = self.sock.recv(MAX_HELLO_NBYTES + sockets.LENGTH.size)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("it closed the connection during the handshake")
        self._out += self._handshake.receive(data)
        self.flush()
        if (facts := self._handshake.facts) is None:
            return
        if facts.get("instance") != self.endpoint.instance:
            raise AuthError(f"another process answers on the port of {self.endpoint.name}")
        self._seals = self._handshake.seals if self._shared is None else None
        self._head_nbytes = sealed_nbytes(HEADER_NBYTES, self._seals)
        sockets.tune(self.sock)
        seconds, microseconds = divmod(int(BODY_WAIT_S * 1e6), 1_000_000)
        self.sock.setblocking(True)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, microseconds))
        self.phase, self._failures = BodyPhase.UP, 0
        rest = self._handshake.rest
        self._scratch[: len(rest)] = rest
        self._have = len(rest)
        self._sink.connection_up(self, facts)
        self._parse()

    # Frames

    def discard(self) -> None:
        """Discards the rest of the current body when it arrives, because the body has lost its place in the pool."""
        if self._header is not None and self._header.kind == FrameKind.BODY:
            self._target = None

    def _receive(self) -> None:
        sock = self.sock
        assert sock is not None  # noqa: S101
        if self._left:
            if not self._receive_payload(sock):
                return
        else:
            try:
                start = self._scratch[self._have :]
                if self._shared is not None:
                    n = self._shared.receive_into(start)
                else:
                    n = sock.recv_into(start, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not n:
                raise ConnectionError("it closed the connection")
            self._have += n
        self._parse()
        if self._left and self._filled:  # part of it came with its header
            self._receive_payload(sock)

    def _parse(self) -> None:
        """Handles the frames in the scratch buffer, and copies the start of a payload from there."""
        at, head_nbytes = 0, self._head_nbytes
        while self._have - at >= head_nbytes:
            head = self._scratch[at : at + head_nbytes]
            if self._seals is not None:
                self._seals.into.open_head(head)
            header = frames.unpack_header(head, FROM_FEEDER)
            at += head_nbytes
            at += self._begin_payload(header, self._scratch[at : self._have])
            if self._left:
                break
        rest = self._have - at
        if rest and at:
            self._scratch[:rest] = bytes(self._scratch[at : self._have])
        self._have = rest

    def _begin_payload(self, header: Header, start: memoryview) -> int:
        """Begins a payload with `start`, the bytes that have arrived. Returns the number of bytes taken from
        `start`."""
        self._header, self._left, self._filled = header, header.nbytes, 0
        self._slow = self._unawaited > 0
        if header.kind == FrameKind.BODY:
            self._unawaited = max(0, self._unawaited - 1)
            self._target = self._sink.connection_body(self, header)
        else:
            if self._left and self._seals is not None:
                self._left += MAC_NBYTES
            self._control = bytearray(self._left)
            self._target = memoryview(self._control)
        n = min(len(start), self._left)
        if n and self._target is not None:
            self._target[:n] = start[:n]
        self._filled, self._left = n, self._left - n
        if not self._left:
            self._end_payload()
        return n

    def _receive_payload(self, sock: socket.socket) -> bool:
        """Receives more of the payload. Returns True once it is complete."""
        target = self._target
        wait = self._left > WAITALL_ABOVE_NBYTES and not self._slow and target is not None
        flags = socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT
        began = time.monotonic() if wait else 0.0
        try:
            if target is None:
                n = sock.recv_into(bytearray(min(self._left, DISCARD_NBYTES)), 0, socket.MSG_DONTWAIT)
            else:
                n = sock.recv_into(target[self._filled : self._filled + self._left], 0, flags)
        except BlockingIOError:
            if wait:
                self._slow = True
                self._waited(BODY_WAIT_S, in_time=False)
            return False
        if not n:
            raise ConnectionError("it closed the connection in the middle of a frame")
        self._filled += n
        self._left -= n
        if wait:
            waited_s = time.monotonic() - began
            self._waited(waited_s, in_time=n >= max(self._left, QUICK * waited_s))
        if self._left:
            self._slow = self._low_water = True
            ahead = 0 if self._tls is None or self._shared is not None else AHEAD_NBYTES
            due = max(1, min(self._left - ahead, LOW_WATER_NBYTES))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, due)
            self._sink.connection_moved(self)
            return False
        if self._low_water:
            self._low_water = False
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._end_payload()
        return True

    def _waited(self, waited_s: float, *, in_time: bool) -> None:
        """Sets the number of upcoming bodies for which the receiver does not wait. Ignores a body that needed no wait,
        because it may have arrived slowly while the receiver waited for another connection."""
        if waited_s < INSTANT_S:
            return
        self._late = 0 if in_time else self._late + 1
        self._unawaited = 0 if in_time else min(1 << self._late, MAX_UNAWAITED)

    def _end_payload(self) -> None:
        header, target, control = self._header, self._target, self._control
        assert header is not None  # noqa: S101
        self._header, self._target, self._control = None, None, None
        if header.kind == FrameKind.BODY:
            if target is not None:
                self._end_body(header, target)
            return
        payload = bytes(control or b"")
        if payload and self._seals is not None:
            payload, mac = payload[:-MAC_NBYTES], payload[-MAC_NBYTES:]
            self._seals.into.open_payload(payload, mac)
        if header.kind == FrameKind.SHARED:
            self._copy(header, payload)
        elif header.kind == FrameKind.UNMAP:
            if self._shared is not None:
                self._shared.unmap(header.room)
        else:
            self._sink.connection_frame(self, header, payload)

    def _copy(self, header: Header, where: bytes) -> None:
        """Copies a body from the feeder's memory."""
        if self._shared is None:
            raise RemoteProtocolError("a batch in shared memory came from a feeder on another machine")
        number, nbytes = frames.unpack_shared(where)
        body = header._replace(kind=FrameKind.BODY, nbytes=nbytes)
        with self._shared.body(number, nbytes) as source:
            target = self._sink.connection_body(self, body)
            if target is not None:
                target[:nbytes] = source
        if self._shared.has_ended:
            raise ConnectionError("it closed the connection while a batch was being copied")
        self.send(frames.pack_header(FrameKind.TAKEN), b"")
        if target is not None:
            self._end_body(body, target)

    def _end_body(self, header: Header, body: memoryview) -> None:
        """Reports a complete body. Raises RemoteProtocolError if it is damaged."""
        if header.flags & Flag.CHECKSUM and not digests.intact(body[: header.nbytes]):
            raise RemoteProtocolError(
                f"batch {header.ticket} from {self.endpoint.name} arrived damaged: its bytes do not match "
                "their digest"
            )
        self._sink.connection_body_done(self, header, digests.of_body(body))
