"""Messages between a trainer process and its sidecar over a Unix SEQPACKET socket. Pure except for `recv_with_fds`.

A packet is a head of 24 bytes and a payload. A payload larger than CHUNK_NBYTES is split into several packets. All
except the last have `more` set. (The send buffer, 208 KiB by default, limits the size of a SEQPACKET message.)

    u8 type, u8 more, u16 protocol, u32 stream, u64 ticket, u64 awaiting

The first message is HELLO, with the trainer's pidfd. If a sidecar has died, HELLO also carries the control memfd, the
two eventfds and the regions' memfds, which the trainer kept. The reply is WELCOME with the control memfd and the two
eventfds, or REFUSED with the reason.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import PROTOCOL
from dataloaderjob.core.sockets import CLOSE_ON_EXEC, TRUNCATED, descriptors, parse_message

HEAD = struct.Struct("<BBHIQQ")
HEAD_NBYTES = HEAD.size
CHUNK_NBYTES = 96 * 1024
MAX_MESSAGE_NBYTES = 64 * 1024 * 1024
MAX_PATH_NBYTES = 107
"""Maximum length of a socket's path: Linux's sun_path has 108 bytes, including the final NUL."""
MAX_FDS = 250


class Type(IntEnum):
    """The type of a message. T: the trainer sends it. S: the sidecar sends it."""

    HELLO = 1
    """T: JSON that identifies the trainer. File descriptors: pidfd, then those of an adoption."""
    WELCOME = 2
    """S: JSON settings. File descriptors: control, wake-trainer, wake-receiver (none at an adoption)."""
    REFUSED = 3
    """S: JSON {"error": ...}. The connection ends."""
    OPEN = 4
    """T: a new stream. JSON {"bundle": manifest, ...}. `awaiting`: the first ticket that is wanted."""
    TICKETS = 5
    """T: any number of tickets, packed by `join_tickets`. `awaiting`: the ticket that the trainer will take next.
    `ticket`: 1 if the trainer sleeps until that ticket is ready."""
    CLOSE = 6
    """T: the stream ends. Tickets from `awaiting` on were not taken."""
    REGION = 7
    """S: a new memfd (one file descriptor): JSON {"region", "nbytes", "single", "lease_limit"}."""
    DROP = 8
    """S: a region with a single batch was removed: JSON {"region"}."""
    FAILED = 9
    """S: a feeder reports that ticket `ticket` failed. Payload: the feeder's own (`making.failures`), which the
    receiver has not checked."""
    NOTE = 10
    """S: a line for the user, JSON {"text": ...}."""
    STATUS = 11
    """T: asks which feeder is late with `ticket`. S: answers with JSON {"late": ...}. Neither of them needs a pool."""
    SNAPSHOT = 12
    """S: the state of a slot of a stream, from which it can be resumed. Payload: `frames.pack_snapshot`."""
    GIVEN_UP = 13
    """S: the receiver itself gave up ticket `ticket`. Payload: `supervision.pack_failure`."""
    ENDED = 14
    """S: the slot of ticket `ticket` has no such batch. Payload: `frames.pack_end`, checked by the receiver."""


class Packet(NamedTuple):
    type: int
    more: int
    protocol: int
    stream: int
    ticket: int
    awaiting: int
    payload: bytes


def pack(
    type_: int, payload: bytes = b"", *, stream: int = 0, ticket: int = 0, awaiting: int = 0
) -> list[bytes]:
    """Returns the packets of one message."""
    if len(payload) <= CHUNK_NBYTES:
        return [HEAD.pack(type_, 0, PROTOCOL, stream, ticket, awaiting) + payload]
    pieces = [payload[i : i + CHUNK_NBYTES] for i in range(0, len(payload), CHUNK_NBYTES)]
    last = len(pieces) - 1
    return [HEAD.pack(type_, i < last, PROTOCOL, stream, ticket, awaiting) + p for i, p in enumerate(pieces)]


def unpack(packet: bytes) -> Packet:
    if len(packet) < HEAD_NBYTES:
        raise RemoteProtocolError(
            f"a packet on the sidecar's socket must have at least {HEAD_NBYTES} bytes, but has {len(packet)}"
        )
    type_, more, protocol, stream, ticket, awaiting = HEAD.unpack_from(packet)
    return Packet(type_, more, protocol, stream, ticket, awaiting, packet[HEAD_NBYTES:])


def pack_json(type_: int, message: dict[str, Any], **fields: int) -> list[bytes]:
    return pack(type_, json.dumps(message, separators=(",", ":")).encode(), **fields)


def parse_json(payload: bytes) -> dict[str, Any]:
    return parse_message(payload, "a message on the sidecar's socket")


class Assembler:
    """An assembler that joins the packets of one direction into messages."""

    def __init__(self, limit_nbytes: int = MAX_MESSAGE_NBYTES) -> None:
        self._limit_nbytes = limit_nbytes
        self._parts: list[bytes] = []
        self.nbytes = 0
        """Number of bytes of an incomplete message that have arrived."""

    def feed(self, packet: bytes) -> Packet | None:
        """Returns a complete message, or None if more packets must follow."""
        part = unpack(packet)
        if not part.more and not self._parts:
            return part
        self._parts.append(part.payload)
        self.nbytes += len(part.payload)
        if self.nbytes > self._limit_nbytes:
            raise RemoteProtocolError(f"a message on the sidecar's socket exceeds {self._limit_nbytes} bytes")
        if part.more:
            return None
        payload = b"".join(self._parts)
        self._parts, self.nbytes = [], 0
        return part._replace(payload=payload)


def recv_with_fds(sock: socket.socket, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receives one packet and its file descriptors (close-on-exec). Raises RemoteProtocolError if any file descriptors
    were lost."""
    # Not socket.recv_fds, which ignores its flags in Python 3.11.
    space = socket.CMSG_SPACE(MAX_FDS * 4)
    data, ancillary, msg_flags, _ = sock.recvmsg(HEAD_NBYTES + CHUNK_NBYTES, space, flags | CLOSE_ON_EXEC)
    fds = descriptors(ancillary)
    if msg_flags & TRUNCATED:
        for fd in fds:
            os.close(fd)
        raise RemoteProtocolError(
            "file descriptors were lost on the sidecar's socket because this process has reached its limit on "
            "open files: raise `ulimit -n`"
        )
    return data, fds
