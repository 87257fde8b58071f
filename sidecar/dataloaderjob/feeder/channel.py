"""Messages between a feeder and the processes that run user code for it: a head, a payload, and at most one file
descriptor.

    u8 kind, u8 1 if a file descriptor is attached, u16 flags, u32 payload bytes, u64 a, u64 b

The messages are sent over a Unix stream socket between processes of the same user, so a malformed message is a bug in
this package.

This module also defines a feeder's sessions and templates, as plain data that `builders` and `bundles` update.

A session is one epoch of one loader (`Bundle.id`) and has one builder at a time. The template, which holds the
loaded bundle, outlives the session and serves the next epoch.

    LOADING   its template is not ready
    STARTING  its builder runs worker_init_fn
    FREE      its builder waits for a task
    BUSY      its builder makes a batch
    ENDING    no receiver needs it any longer; its builder is about to exit
    (none)    forgotten
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum, IntEnum, auto
from typing import NamedTuple, Protocol, TypedDict, Unpack

from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.sockets import CLOSE_ON_EXEC, DO_NOT_WAIT, descriptors
from dataloaderjob.feeder.feeding_states import Task

_HEAD = struct.Struct("<BBHIQQ")
_READ_NBYTES = 256 * 1024
_FDS_NBYTES = socket.CMSG_SPACE(16 * 4)
BUILT = struct.Struct("<QQ")
"""Payload of MessageKind.BUILT: the number of the buffer, and the size in bytes of the body in it. If the batch was
made for this message, its cost follows (`core.costs`)."""
ENDED = struct.Struct("<qQq")
"""Payload of MessageKind.ENDED: exit code (negative: signal), serial number of the current task, position of its
sample."""
NOWHERE = -1
"""The position in ENDED if no sample was being made."""


class MessageKind(IntEnum):
    """Kinds of messages. F: sent by the feeder, T: by a template, B: by a builder."""

    FORK = 1
    """F to T: fork builder `a`; the file descriptor is its channel. `b`: size of a body, for warming up; 0 if
    unknown."""
    KILL = 2
    """F to T: kill builder `a`."""
    LOADED = 3
    """T: the bundle is loaded; loading took `a` ns."""
    LOAD_FAILED = 4
    """T: the bundle cannot be loaded; payload: `making.failures`. The template exits."""
    ENDED = 5
    """T: the process of builder `a` has exited; payload: `ENDED`."""
    INIT = 6
    """F to B: the session to work for; payload: JSON of `Introduction`. A file descriptor, if any, is for the
    output."""
    UP = 7
    """B: worker_init_fn has run."""
    INIT_FAILED = 8
    """B: worker_init_fn raised an error; payload: `making.failures`. The builder exits."""
    BUILD = 9
    """F to B: make ticket `b` (payload: `ticket_codec.pack_ticket`) as job `a`; flags as in the ticket's frame."""
    BUFFER = 10
    """B: new buffer `a` of `b` bytes; the file descriptor is its memfd."""
    DROP = 11
    """B: buffer `a` is no longer used."""
    BUILT = 12
    """B: job `a` is built; payload: `BUILT`."""
    FAILED = 13
    """B: user code failed in job `a`; payload: `making.failures`. Flags as in the feeder's frame."""
    PROGRESS = 14
    """B: about to make sample `b` of job `a`, which may kill the process. The builder waits for ACK."""
    ACK = 15
    """F to B: the feeder has forwarded PROGRESS."""
    FREE = 16
    """F to B: the body in buffer `a` was sent or dropped."""
    SNAPSHOT = 17
    """B: a snapshot of the slot after `a` batches; payload: the slot's state."""
    NO_STATE = 18
    """B: a warning about rebuilding the slot; payload: the text. F to B: no snapshot is wanted."""
    REPLAYED = 19
    """B: for job `a`, `b` earlier batches of its slot have been rebuilt."""


class Message(NamedTuple):
    kind: int
    flags: int
    a: int
    b: int
    payload: bytes
    fd: int | None


class Fields(TypedDict, total=False):
    """Optional fields of a message, in addition to its kind and file descriptor."""

    a: int
    b: int
    flags: int
    payload: bytes


def _packed(kind: int, has_fd: bool, a: int = 0, b: int = 0, flags: int = 0, payload: bytes = b"") -> bytes:
    return _HEAD.pack(kind, has_fd, flags, len(payload), a, b) + payload


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)


class Watching(Protocol):
    """A loop that calls a callback when a channel has data to read, or can accept more."""

    def watch(self, end: Channel, callback: Callable[[], None]) -> None: ...
    def unwatch(self, end: Channel) -> None: ...


class Channel:
    """One end of a channel. Builders use the blocking methods, `receive` and `send`. Loops use the others, `read` and
    `post`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # regardless of the default that user code has set
        self.sock = sock
        self._in = bytearray()
        self._fds: deque[int] = deque()
        self._out = bytearray()
        self._out_fds: deque[tuple[int, int]] = deque()
        """(number of bytes of `_out` before the message, file descriptor) for each unsent message with a file
        descriptor."""

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()
        for fd in (*self._fds, *(fd for _, fd in self._out_fds)):
            os.close(fd)
        self._fds.clear()
        self._out_fds.clear()

    # Out

    def send(self, kind: int, *, fd: int | None = None, **fields: Unpack[Fields]) -> None:
        """Sends a message, and blocks until it is sent. Raises OSError if the other end is gone."""
        data = _packed(kind, fd is not None, **fields)
        if fd is not None:
            sent = socket.send_fds(self.sock, [data], [fd])
            data = data[sent:]
        if data:
            self.sock.sendall(data)

    def post(self, kind: int, *, fd: int | None = None, **fields: Unpack[Fields]) -> None:
        """Queues a message, and sends as much as possible without blocking. Takes ownership of `fd`."""
        if fd is not None:
            self._out_fds.append((len(self._out), fd))
        self._out += _packed(kind, fd is not None, **fields)
        self.flush()

    def flush(self) -> bool:
        """Sends queued messages. Returns True if none is left or the channel is broken, which `read` then reports."""
        try:
            while self._out:
                self._push()
        except BlockingIOError:
            return False
        except OSError:
            self._out.clear()
        return True

    def _push(self) -> None:
        fds: list[int] = []
        end = len(self._out)
        if self._out_fds:
            at, fd = self._out_fds[0]
            if at:
                end = at
            else:
                fds = [fd]
                end = self._out_fds[1][0] if len(self._out_fds) > 1 else end
        data = bytes(self._out[:end])
        if fds:
            sent = socket.send_fds(self.sock, [data], fds, socket.MSG_DONTWAIT)
            os.close(self._out_fds.popleft()[1])
        else:
            sent = self.sock.send(data, socket.MSG_DONTWAIT)
        del self._out[:sent]
        self._out_fds = deque((at - sent, fd) for at, fd in self._out_fds)

    # In

    def receive(self) -> Message | None:
        """Waits for the next message, within the socket's timeout. Returns None at the end of the stream."""
        while (message := self._next()) is None:
            if not self._fill(0):
                return None
        return message

    def read(self) -> tuple[list[Message], bool]:
        """Returns the messages that have arrived, without blocking, and False if the other end is gone."""
        alive = True
        with contextlib.suppress(BlockingIOError):
            while alive:
                alive = self._fill(DO_NOT_WAIT)
        return list(iter(self._next, None)), alive

    def _fill(self, flags: int) -> bool:
        try:
            data, ancillary, _, _ = self.sock.recvmsg(_READ_NBYTES, _FDS_NBYTES, flags | CLOSE_ON_EXEC)
        except ConnectionError:
            return False
        self._fds.extend(descriptors(ancillary))
        self._in += data
        return bool(data)

    def _next(self) -> Message | None:
        if len(self._in) < _HEAD.size:
            return None
        kind, has_fd, flags, nbytes, a, b = _HEAD.unpack_from(self._in)
        end = _HEAD.size + nbytes
        if len(self._in) < end:
            return None
        payload = bytes(self._in[_HEAD.size : end])
        del self._in[:end]
        return Message(kind, flags, a, b, payload, self._fds.popleft() if has_fd else None)


class BuilderPhase(Enum):
    LOADING = auto()
    STARTING = auto()
    FREE = auto()
    BUSY = auto()
    ENDING = auto()


class SharedBuffer:
    """A builder's buffer, mapped for reading. Its file descriptor is for receivers on this machine."""

    __slots__ = ("__weakref__", "fd", "map", "number")
    _numbers = itertools.count(1)

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes ownership of `fd` for the buffer's lifetime. Raises OSError."""
        self.fd = fd
        self.number = next(self._numbers)
        """Identifies the buffer to receivers."""
        self.map = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)

    def __del__(self) -> None:
        os.close(self.fd)


class Body(NamedTuple):
    """A built batch in shared memory."""

    session: Session
    buffer: int
    view: memoryview
    memory: SharedBuffer


@dataclass(slots=True, eq=False)
class Session:
    """A session. The module's docstring lists its phases."""

    bundle: Bundle
    template: Template
    base_seed: int
    since: float
    phase: BuilderPhase = BuilderPhase.LOADING
    number: int = 0
    """The template's number for the session's builder."""
    channel: Channel | None = None
    task: Task | None = None
    buffers: dict[int, SharedBuffer] = field(default_factory=dict)
    deadline: float = float("inf")
    """The time at which the session's builder is killed."""
    ended_at: float = 0.0
    orphan_since: float | None = None
    noted_at: float = 0.0
    introduction: bytes = b""
    slot: SlotSession | None = None
    replayed: int = 0
    """Number of the slot's batches that the builder has rebuilt for the task, according to the builder's last
    report."""


@dataclass(slots=True)
class SlotSession:
    """A feeder's record of the slot that a session makes."""

    first: tuple[int, bytes] | None = None
    """The snapshot on trial: (batches made, state)."""
    last: tuple[int, bytes] | None = None
    """The latest snapshot: (batches made, state)."""
    trials: int = 0
    """Number of trials started."""
    is_tried: bool = False
    """True while a trial runs."""
    has_ended: bool = False
    """True once the slot has no further batches. A ticket for a further batch is then answered at once."""
    is_exact: bool | None = None
    """True if snapshots restore the slot exactly; None until a trial has determined this."""


@dataclass(slots=True, eq=False)
class Template:
    """A loaded bundle, and the process that holds it and forks builders."""

    bundle: Bundle
    channel: Channel
    loaded: bool = False
    again: bool = False
    """True for the second attempt to load the bundle. The first template died while loading, perhaps because another
    feeder failed."""
    used_at: float = 0.0
    last_number: int = 0
    sessions: list[Session] = field(default_factory=list)
    spare: tuple[int, Channel] | None = None
    """A builder forked ahead of time, so that the next epoch begins without a fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """A builder's instructions: the session for which it works, and its identity in that session."""

    feeder: str
    index: int
    num_workers: int
    base_seed: int
    allow_pickle: bool
    is_slot: bool = False
    """True if the builder makes slot `index` of an IterableDataset."""
    env: dict[str, str] = field(default_factory=dict)
    """The value of `Bundle.env`."""
    ranks: int = 0
    """The value of `Bundle.ranks`."""
    held: dict[str, int] = field(default_factory=dict)
    """The value of `Bundle.held`."""

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def parse(data: bytes) -> Introduction:
        return Introduction(**json.loads(data))
