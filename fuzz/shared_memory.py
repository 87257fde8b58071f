"""Targets: memory that a trainer and its receiver share, as either side finds it."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

from dataloaderjob.core import control
from dataloaderjob.core.control import LEASES, Control
from dataloaderjob.sidecar.dispatch.placing import Placer
from dataloaderjob.sidecar.dispatch.streams import Extent
from fuzz.target import Target

_ENTRY = struct.Struct("<Qqqq")
_REGION_NBYTES = 1 << 20
_ASKED = struct.Struct("<IQ")
_SPAN = 1 << 14


def _words(data: bytes) -> None:
    """A hostile side writes what it likes. The other one reads a ticket's word and entry, and ended leases."""
    fd = Control.create()
    try:
        side = Control(fd)
    finally:
        os.close(fd)
    try:
        stream, ticket = _ASKED.unpack_from(data.ljust(_ASKED.size, b"\0"))
        rest = data[_ASKED.size :][:_SPAN]
        for view in (side.words.cast("B"), side._entries, side.ended):  # noqa: SLF001  as a peer writes them
            view[: len(rest[: len(view)])] = rest[: len(view)]
        side.publish(int.from_bytes(rest[:2], "little") % LEASES, stream, ticket, 1, 0, 8)
        found = side.find(stream, ticket)
        assert found is not None
        assert found[0] <= control.FAILED
        assert all(0 <= lease <= 64 for lease in side.ended_leases(64))
        side.sleep(stream & 0xFFFF, ticket % control.WINDOW, after=0)
    finally:
        side.close()


def _claims(data: bytes) -> None:
    """A trainer claims leases after its sidecar's death: none may overlap another, or leave its region."""
    placer = Placer(4 * _REGION_NBYTES, None, [])
    placer.space.adopt(1, _REGION_NBYTES, single=False)
    for fields in _ENTRY.iter_unpack(data[: len(data) - len(data) % _ENTRY.size]):
        lease, region, offset, nbytes = fields
        placer.adopt(lease, Extent(region, offset, nbytes))
    placer.adopted()
    end = 0
    for _, _, extent in sorted(placer.lent.values(), key=lambda one: one[2].offset):
        assert extent.offset >= end
        end = extent.offset + extent.nbytes
    assert end <= _REGION_NBYTES
    for lease in list(placer.lent):
        placer.end_lease(lease)
    assert placer.space.used_nbytes == 0


def _claimed() -> Sequence[bytes]:
    whole = [(0, 1, 0, 4096), (1, 1, 8192, 100), (7, 1, _REGION_NBYTES - 4096, 4096), (8, 1, 0, 1)]
    return [
        b"".join(_ENTRY.pack(*one) for one in whole),
        _ENTRY.pack(0, 1, -4096, 0) + _ENTRY.pack(1, 1, 0, -1),
    ]


TARGETS = (
    Target(
        name="control-words",
        parse=_words,
        seeds=lambda: [_ASKED.pack(1, 5) + bytes(64), _ASKED.pack(0xFFFFFFFF, 1 << 63) + b"\1" * 200],
        declared=(),
        max_nbytes=1024,
    ),
    Target(name="adopted-leases", parse=_claims, seeds=_claimed, declared=(), max_nbytes=1024),
)
