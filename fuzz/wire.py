"""Targets: what a feeder and a receiver send each other: frames, the payloads of tickets, failures, bundles."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from dataloaderjob.core import frames, ipc, supervision, ticket_codec
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.frames import FROM_FEEDER, FROM_RECEIVER, FrameKind
from dataloaderjob.core.ticket_codec import KeyForm, ReadSamples, SlotTicket
from dataloaderjob.making import failures
from dataloaderjob.trainer.session.stream import SlotEndedError, SlotGoesOnError
from dataloaderjob.trainer.session.taking import failure_of
from fuzz.target import Target, mutate_json

_CHECKED = frames.HEADER_NBYTES - 4
_FORM_AT = 17
_CODE = (KeyForm.PICKLED, KeyForm.ITEMS)
"""Key forms that are pickles. Tickets are code, from the trainer to its feeders, so these are not fuzzed."""


def _header(data: bytes) -> None:
    """Gives each input a right magic, version and checksum, too: a mutation never finds these by itself."""
    data = data[: frames.HEADER_NBYTES].ljust(frames.HEADER_NBYTES, b"\0")
    right = struct.pack("<HB", frames.MAGIC, frames.PROTOCOL) + data[3:_CHECKED]
    right += struct.pack("<I", zlib.crc32(right))
    allowed = FROM_FEEDER if data[3] in FROM_FEEDER else FROM_RECEIVER
    found = frames.unpack_header(right, allowed)
    limit = frames.MAX_BODY_NBYTES if found.kind == FrameKind.BODY else frames.MAX_CONTROL_NBYTES
    assert found.kind in allowed
    assert found.nbytes <= limit
    frames.unpack_header(data, allowed)


def _headers() -> Sequence[bytes]:
    plain = [frames.pack_header(kind) for kind in FrameKind]
    full = [
        frames.pack_header(kind, nbytes=1 << 26, room=1 << 20, stream=7, ticket=1 << 40) for kind in FrameKind
    ]
    return plain + full


def _tickets(data: bytes) -> None:
    for _, ticket in ticket_codec.split_tickets(data):
        _ticket(ticket)


def _ticket(data: bytes) -> None:
    ticket_codec.slot_of(data), ticket_codec.describe_keys(data), ticket_codec.describe_keys(data, 1)
    ticket_codec.positions_of(data), ticket_codec.base_seed_of(data), ticket_codec.ints_of(data)
    if len(data) > _FORM_AT and data[_FORM_AT] not in _CODE:
        ticket_codec.unpack_slot_ticket(data)
        ticket_codec.unpack_ticket(data)


def _one_by_one() -> list[bytes]:
    slot = SlotTicket(9, 4, 1, 32, False, True, 3, (2, 7), (3, b"D" + bytes(40)), True)
    return [
        ticket_codec.pack_ticket(1, 2, [3, -4, 5]),
        ticket_codec.pack_ticket(1, 2, []),
        ticket_codec.pack_slot_ticket(slot),
        ticket_codec.pack_slot_ticket(SlotTicket(9, 4, 1, 32)),
        ticket_codec.with_draws(
            ticket_codec.pack_read_samples(3, 4, ReadSamples(2, 8, b"samples"), bare=False), 5
        ),
    ]


def _joined() -> Sequence[bytes]:
    return [ticket_codec.join_tickets(list(enumerate(_one_by_one()))), ticket_codec.join_tickets([])]


def _small(data: bytes) -> None:
    for parse in (frames.unpack_snapshot, frames.unpack_shared):
        try:
            parse(data)
        except RemoteProtocolError:
            continue
    frames.says_there(data)
    if frames.says_end(data):
        assert 0 <= frames.unpack_end(data, 4) <= 4


def _failure(data: bytes) -> None:
    """As the sidecar and the trainer read what a feeder sent in place of a batch."""
    supervision.describe_failure(data)
    for kind in (ipc.Type.FAILED, ipc.Type.GIVEN_UP, ipc.Type.ENDED):
        found = failure_of(ipc.Packet(kind, 0, frames.PROTOCOL, 1, 2, 0, data))
        assert not isinstance(found, StopIteration | StopAsyncIteration)
        assert kind == ipc.Type.ENDED or type(found) not in (SlotEndedError, SlotGoesOnError)


def _failures() -> Sequence[bytes]:
    found = [supervision.pack_failure("DeadlineExceeded", "feeder-0 is late"), frames.pack_end(4)]
    for error in (KeyError("a", 3), OSError(2, "no file", "/x"), ValueError("bad: \ud800"), StopIteration()):
        try:
            raise error
        except Exception as exc:
            found.append(failures.pack_failure(exc, phase="collate_fn", feeder="feeder-1"))
    return found


def _bundles() -> Sequence[bytes]:
    digest = "a" * 64
    full = Bundle(
        blobs=((digest, 5), ("b" * 64, 1 << 30)), allow_pickle=True, facts={"python": "3.11"}, loader=1, epoch=2,
        workers=4, slot=1, env={"RANK": "0"}, ranks=2, taken=(3, 4), held={"x": 1},
    )  # fmt: skip
    return [full.manifest(), Bundle(blobs=((digest, 0),)).manifest()]


_REFUSED = (RemoteProtocolError,)
TARGETS = (
    Target(name="frame-headers", parse=_header, seeds=_headers, declared=_REFUSED, max_nbytes=64),
    Target(name="frame-tickets", parse=_tickets, seeds=_joined, declared=_REFUSED),
    Target(name="frame-ticket", parse=_ticket, seeds=_one_by_one, declared=_REFUSED),
    Target(
        name="frame-payloads",
        parse=_small,
        seeds=lambda: [
            frames.pack_snapshot(1, 2, b"Dstate"),
            frames.pack_shared(3, 1 << 20),
            frames.pack_end(4),
        ],
        declared=_REFUSED,
    ),
    Target(name="failures", parse=_failure, seeds=_failures, declared=_REFUSED, mutate=mutate_json),
    Target(name="bundles", parse=Bundle.parse, seeds=_bundles, declared=_REFUSED, mutate=mutate_json),
)
