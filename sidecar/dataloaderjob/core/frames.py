"""Frames between a sidecar's receiver and a feeder. Pure: no sockets.

A frame is a header of 64 bytes, then `nbytes` bytes of payload. Integers are little endian. Over TCP, `core.seals` adds
a number and a MAC after the header, and a MAC after any payload that is not a body.

| field      | type | meaning |
|------------|------|---------|
| magic      | u16  | 0x4A44 |
| version    | u8   | PROTOCOL |
| kind       | u8   | `FrameKind` |
| flags      | u16  | `Flag` |
| load       | u16  | feeder: tickets queued or being built, for all its sidecars |
| stream     | u32  | one live iterator of a trainer process |
| ticket     | u64  | position of the batch in its stream, from 0 |
| bundle     | 16 B | `Bundle.id`: the user's code and data that make the batch, and the batch's session |
| nbytes     | u64  | payload bytes after this header |
| room       | u64  | TICKET: bytes already reserved, without a GRANT. ANNOUNCE: size of the body. PROGRESS: position.
|            |      | BODY, SHARED: number of bundles that the feeder has loaded. UNMAP: number of a buffer |
|            | u64  | 0 |
| check      | u32  | CRC-32 of the preceding 60 bytes |
"""

from __future__ import annotations

import json
import struct
import zlib
from enum import IntEnum
from typing import NamedTuple

from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.sockets import parse_message

PROTOCOL = 9
MAGIC = 0x4A44
HEADER = struct.Struct("<HBBHHIQ16sQQ8xI")
HEADER_NBYTES = HEADER.size
_HEAD = struct.Struct("<HBBHHIQ16sQQ8x")
_CHECK = struct.Struct("<I")
MAX_CONTROL_NBYTES = 64 * 1024 * 1024
"""Maximum payload of a TICKET or BUNDLE frame, in bytes. A ticket with a million indices takes 8 MB."""
MAX_TEXT_NBYTES = 16 * 1024
MAX_FAILED_NBYTES = 1 << 20
"""Maximum size of a failure (`making.failures`). The limits of its text, values and traceback add up to less."""
MAX_BODY_NBYTES = 1 << 40
NO_BUNDLE = bytes(16)
_SNAPSHOT = struct.Struct("<IQ")
_SHARED = struct.Struct("<QQ")
MAX_SNAPSHOT_NBYTES = 1 << 20
"""Maximum size of a slot's snapshot. A loader's state contains one snapshot for each slot."""
TICKET_DEPTH = 2
"""Number of tickets that a feeder holds if possible: one to work on, and one to hide the round trip."""

assert HEADER_NBYTES == 64  # noqa: S101  the layout above is the protocol


class FrameKind(IntEnum):
    """The meaning of a frame. R: the receiver sends it. F: the feeder sends it."""

    TICKET = 1
    """R: make this batch. Payload: `pack_ticket`."""
    GRANT = 2
    """R: the extent for the announced body has been allocated. Send the body."""
    CANCEL = 3
    """R: forget this ticket, even if its batch is built."""
    ANNOUNCE = 4
    """F: the batch is built, and is larger than the ticket's `room`. `room`: the size of the batch."""
    BODY = 5
    """F: the batch itself (`layout`)."""
    FAILED = 6
    """F: user code failed. Payload: `making.failures`. With Flag.ELSEWHERE, another feeder may succeed."""
    PROGRESS = 7
    """F: a builder is about to make sample number `room` of this ticket. Sent only for tickets with Flag.PROBE."""
    NEED_BUNDLE = 8
    """F: the feeder does not know `bundle`."""
    BUNDLE = 9
    """R: the bundle. Payload: its manifest (JSON)."""
    NOTE = 10
    """F: a note for the user, for example that an import is slow. Payload: a line of text."""
    CANCELLED = 11
    """F: work on this cancelled ticket has ended. This shows that a feeder that was suspected of hanging responds
    again."""
    LOST = 12
    """F: the process that was making this ticket has exited. `room`: the sample's position plus 1, or 0 if no sample
    was being made. Payload: how the process exited."""
    RELEASE = 13
    """R: no stream uses `bundle` any longer."""
    ALIVE = 14
    """F: this ticket is still being made. The delay is in user code, not in the feeder. `room`: the number of earlier
    batches of its slot that have been rebuilt so far."""
    SNAPSHOT = 15
    """F: the state of a slot after some batches, from which another feeder can resume. Payload: `pack_snapshot`."""
    SHARED = 16
    """F: the batch is in the feeder's shared memory, on the receiver's machine. This frame replaces BODY. Payload:
    `pack_shared`. The first such frame for a buffer carries the buffer's file descriptor."""
    TAKEN = 17
    """R: the earliest outstanding SHARED batch has been copied, or is no longer wanted."""
    UNMAP = 18
    """F: buffer `room` is no longer in use."""


class Flag(IntEnum):
    """Bits of a header's `flags`. This is not an IntFlag, because the `&` of an IntFlag takes 2 µs or more."""

    CHECKSUM = 1
    """Makes the receiver verify this BODY against its digest (`core.digests`). A TICKET with this flag requests a BODY
    with this flag."""
    PROBE = 2
    """Requests PROGRESS before each sample of a TICKET, because the ticket was outstanding when a feeder died or
    hung."""
    ELSEWHERE = 4
    """Marks a FAILED from a feeder that could not load the bundle. Other feeders may be able to load it."""
    ENDED = 8
    """Marks a FAILED that reports no failure. Either the ticket's slot has no such batch (payload `pack_end`), or the
    ticket only asked whether the batch exists, and it does (`pack_there`)."""
    RESTORABLE = 16
    """Marks a slot's TICKET that omits an existing snapshot or digest, because a builder of the slot should already
    have begun. A builder that has not begun exits, and the ticket is sent again in full."""
    MEMORY = 32
    """Marks a LOST for a process that the kernel killed for lack of memory."""


SINCE = ", since "
"""Text that precedes the time in a NOTE about a feeder's unfinished work."""
FROM_RECEIVER = frozenset(
    {
        FrameKind.TICKET,
        FrameKind.GRANT,
        FrameKind.CANCEL,
        FrameKind.BUNDLE,
        FrameKind.RELEASE,
        FrameKind.TAKEN,
    }
)
FROM_FEEDER = frozenset(FrameKind) - FROM_RECEIVER


_LIMITS = {
    FrameKind.TICKET: MAX_CONTROL_NBYTES,
    FrameKind.BUNDLE: MAX_CONTROL_NBYTES,
    FrameKind.BODY: MAX_BODY_NBYTES,
    FrameKind.FAILED: MAX_FAILED_NBYTES,
    FrameKind.NOTE: MAX_TEXT_NBYTES,
    FrameKind.LOST: MAX_TEXT_NBYTES,
    FrameKind.SNAPSHOT: _SNAPSHOT.size + MAX_SNAPSHOT_NBYTES,
    FrameKind.SHARED: _SHARED.size,
}
_LIMIT_OF = tuple(_LIMITS.get(kind, 0) for kind in range(max(FrameKind) + 1))  # type: ignore[call-overload]
"""Maximum payload of each kind of frame, in bytes. It is 0 for kinds that `_LIMITS` does not list."""


class Header(NamedTuple):
    """A decoded header. The table above describes its fields."""

    kind: int
    flags: int
    load: int
    stream: int
    ticket: int
    bundle: bytes
    nbytes: int
    room: int


def pack_header(
    kind: int,
    *,
    stream: int = 0,
    ticket: int = 0,
    bundle: bytes = NO_BUNDLE,
    nbytes: int = 0,
    room: int = 0,
    flags: int = 0,
    load: int = 0,
) -> bytes:
    """Returns the 64 bytes of a header."""
    head = _HEAD.pack(MAGIC, PROTOCOL, kind, flags, min(load, 0xFFFF), stream, ticket, bundle, nbytes, room)
    return head + _CHECK.pack(zlib.crc32(head))


def unpack_header(data: bytes | bytearray | memoryview, allowed: frozenset[FrameKind]) -> Header:
    """Checks and decodes the first 64 bytes of `data`.

    Raises RemoteProtocolError, before anything is allocated, if the header is corrupt, is of another version, or has a
    kind or length that is not allowed.
    """
    magic, version, kind, flags, load, stream, ticket, bundle, nbytes, room, check = HEADER.unpack_from(data)
    if magic != MAGIC or zlib.crc32(memoryview(data)[: _HEAD.size]) != check:
        raise RemoteProtocolError("a frame header is corrupt (magic or checksum); the connection is closed")
    if version != PROTOCOL:
        raise RemoteProtocolError(f"expected protocol version {PROTOCOL}, but the peer speaks {version}")
    if kind not in allowed:
        raise RemoteProtocolError(f"a frame of kind {kind} is not allowed from this peer")
    limit = _LIMIT_OF[kind]
    if nbytes > limit or room > MAX_BODY_NBYTES:
        raise RemoteProtocolError(f"a {FrameKind(kind).name} frame of {nbytes} bytes exceeds {limit}")
    return Header(kind, flags, load, stream, ticket, bundle, nbytes, room)


def pack_snapshot(slot: int, made: int, data: bytes) -> bytes:
    return _SNAPSHOT.pack(slot, made) + data


def unpack_snapshot(data: bytes) -> tuple[int, int, bytes]:
    """Decodes a slot's snapshot: (slot, batches made, state). Raises RemoteProtocolError if `data` is not a
    snapshot."""
    if not 0 <= len(data) - _SNAPSHOT.size <= MAX_SNAPSHOT_NBYTES:
        raise RemoteProtocolError(
            f"a snapshot may have at most {MAX_SNAPSHOT_NBYTES} bytes, but has {len(data)}"
        )
    slot, made = _SNAPSHOT.unpack_from(data)
    return slot, made, data[_SNAPSHOT.size :]


def pack_shared(buffer: int, nbytes: int) -> bytes:
    """Returns the payload of a SHARED frame: the body is the first `nbytes` of a buffer."""
    return _SHARED.pack(buffer, nbytes)


def unpack_shared(data: bytes) -> tuple[int, int]:
    """Returns (number of the buffer, bytes of the body). Raises RemoteProtocolError for any other payload."""
    if len(data) != _SHARED.size:
        raise RemoteProtocolError(f"a SHARED payload must have {_SHARED.size} bytes, but has {len(data)}")
    return _SHARED.unpack(data)


def pack_end(batches: int) -> bytes:
    """Returns the payload of a FAILED frame with Flag.ENDED: the number of batches in the slot."""
    return json.dumps({"ended": batches}).encode()


def says_end(payload: bytes) -> bool:
    """Returns True if the payload of a FAILED frame with Flag.ENDED is from `pack_end`."""
    return payload.startswith(b'{"ended"')


def unpack_end(payload: bytes, number: int) -> int:
    """Returns the number of batches of a slot that lacks batch `number`. Raises RemoteProtocolError if `payload` is not
    from `pack_end`, or if the slot would have that batch."""
    batches = parse_message(payload, "the end of a slot").get("ended")
    if type(batches) is not int or not 0 <= batches <= number:
        raise RemoteProtocolError(
            f"a slot without batch {number} must have 0 to {number} batches, but a feeder reported {batches!r}"
        )
    return batches


def says_there(payload: bytes) -> bool:
    """Returns True if the payload of a FAILED frame with Flag.ENDED is from `pack_there`."""
    return payload.startswith(b'{"there"')


def pack_there(number: int) -> bytes:
    """Returns the payload of a FAILED frame with Flag.ENDED that answers a ticket that asks: batch `number` exists."""
    return json.dumps({"there": number}).encode()
