"""Frames of the TCP connection between a sidecar's receiver and a feeder. Pure: no sockets.

A frame is a header of 64 bytes, then `nbytes` bytes of payload. Integers are little endian.

| field      | type | meaning |
|------------|------|---------|
| magic      | u16  | 0x4A44 |
| version    | u8   | PROTOCOL |
| kind       | u8   | `Kind` |
| flags      | u16  | `Flag` |
| load       | u16  | feeder: tickets queued or being built, of all its sidecars |
| generation | u32  | of the sender's view of the pool: a frame of another generation is stale |
| stream     | u32  | one live iterator of a trainer process |
| ticket     | u64  | position of the batch in its stream, from 0 |
| bundle     | 16 B | `Bundle.id`: the user's code and data that make the batch, and the session that it is made in |
| nbytes     | u64  | payload bytes behind this header |
| room       | u64  | TICKET: bytes reserved, may be sent unasked. ANNOUNCE: size of the body. PROGRESS: position.
|            |      | BODY: bundles that the feeder has loaded so far |
| crc        | u32  | crc32 of the payload if `Flag.CHECKSUM`, else 0 |
| check      | u32  | crc32 of the 60 bytes before |
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum, IntFlag
from typing import NamedTuple

from dataloaderjob.core.errors import RemoteProtocolError

PROTOCOL = 2
MAGIC = 0x4A44
HEADER = struct.Struct("<HBBHHIIQ16sQQII")
HEADER_NBYTES = HEADER.size
_HEAD = struct.Struct("<HBBHHIIQ16sQQI")
_CHECK = struct.Struct("<I")
MAX_CONTROL_NBYTES = 64 * 1024 * 1024
"""Largest payload of any frame but BODY: a ticket with a million indices takes 8 MB."""
MAX_BODY_NBYTES = 1 << 40
NO_BUNDLE = bytes(16)

assert HEADER_NBYTES == 64  # noqa: S101  the layout above is the protocol


class Kind(IntEnum):
    """What a frame says. R = sent by the receiver, F = by the feeder."""

    TICKET = 1
    """R: make this batch. Payload: `tickets.pack`."""
    GRANT = 2
    """R: the extent for the announced body exists; send it."""
    CANCEL = 3
    """R: forget this ticket; built or not."""
    ANNOUNCE = 4
    """F: the batch is built; `room` is its size. Sent when it exceeds the ticket's `room`."""
    BODY = 5
    """F: the batch itself (`layout`)."""
    FAILED = 6
    """F: user code failed. Payload: `failures.pack`. With Flag.ELSEWHERE another feeder may fare better."""
    PROGRESS = 7
    """F: about to make sample number `room` of this ticket. Only for tickets with Flag.PROBE."""
    NEED_BUNDLE = 8
    """F: `bundle` is not known here."""
    BUNDLE = 9
    """R: payload is the bundle's manifest (JSON)."""
    NOTE = 10
    """F: payload is a line of text for the user: loading a dataset, a slow import."""
    CANCELLED = 11
    """F: nothing is made of this cancelled ticket any more. Tells that a suspect is alive again."""
    LOST = 12
    """F: the process that made this ticket ended. `room`: position of the sample + 1, 0 if none was being made.
    Payload: how it ended."""
    RELEASE = 13
    """R: no stream uses `bundle` any more."""
    ALIVE = 14
    """F: this ticket is still being made: what takes so long is user code, not the feeder."""


class Flag(IntFlag):
    CHECKSUM = 1
    """`crc` covers the payload. In a TICKET: the body must carry it."""
    PROBE = 2
    """Asks in a TICKET: report PROGRESS before each sample; this ticket was out when a feeder died or hung."""
    ELSEWHERE = 4
    """Says in FAILED: the bundle could not be loaded here; nothing is said of other feeders."""


FROM_FEEDER = frozenset(
    {
        Kind.ANNOUNCE,
        Kind.BODY,
        Kind.FAILED,
        Kind.PROGRESS,
        Kind.NEED_BUNDLE,
        Kind.NOTE,
        Kind.CANCELLED,
        Kind.LOST,
        Kind.ALIVE,
    }
)
FROM_RECEIVER = frozenset({Kind.TICKET, Kind.GRANT, Kind.CANCEL, Kind.BUNDLE, Kind.RELEASE})


class Header(NamedTuple):
    """A decoded header; see the table above."""

    kind: int
    flags: int
    load: int
    generation: int
    stream: int
    ticket: int
    bundle: bytes
    nbytes: int
    room: int
    crc: int


def pack(
    kind: int,
    *,
    generation: int,
    stream: int = 0,
    ticket: int = 0,
    bundle: bytes = NO_BUNDLE,
    nbytes: int = 0,
    room: int = 0,
    flags: int = 0,
    load: int = 0,
    crc: int = 0,
) -> bytes:
    """Returns the 64 bytes of a header."""
    head = _HEAD.pack(
        MAGIC, PROTOCOL, kind, flags, min(load, 0xFFFF), generation, stream, ticket, bundle, nbytes, room, crc
    )
    return head + _CHECK.pack(zlib.crc32(head))


def unpack(data: bytes | bytearray | memoryview, allowed: frozenset[Kind]) -> Header:
    """Checks and decodes the first 64 bytes of `data`.

    Raises RemoteProtocolError before anything is allocated when magic, version, checksum, kind
    or length are not what a peer of this role may send.
    """
    magic, version, kind, flags, load, generation, stream, ticket, bundle, nbytes, room, crc, check = (
        HEADER.unpack_from(data)
    )
    if magic != MAGIC or zlib.crc32(memoryview(data)[: _HEAD.size]) != check:
        raise RemoteProtocolError("a frame header is corrupt (magic or checksum); the connection is closed")
    if version != PROTOCOL:
        raise RemoteProtocolError(f"protocol version {PROTOCOL} is needed, the peer speaks {version}")
    if kind not in allowed:
        raise RemoteProtocolError(f"a frame of kind {kind} is not allowed from this peer")
    limit = MAX_BODY_NBYTES if kind == Kind.BODY else MAX_CONTROL_NBYTES
    if nbytes > limit or room > MAX_BODY_NBYTES:
        raise RemoteProtocolError(f"a {Kind(kind).name} frame of {nbytes} bytes exceeds {limit}")
    return Header(kind, flags, load, generation, stream, ticket, bundle, nbytes, room, crc)
