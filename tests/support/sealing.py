"""Frames with their seals, for parts that a test plays."""

from __future__ import annotations

import socket

from dataloaderjob.core import frames, sockets
from dataloaderjob.core.frames import HEADER_NBYTES, FrameKind
from dataloaderjob.core.seals import MAC_NBYTES, SEAL_NBYTES, Seals

KINDS = frozenset(FrameKind)


def sealed(seals: Seals | None, header: bytes, payload: bytes = b"", *, is_body: bool = False) -> bytes:
    """One frame, whatever its header says."""
    if seals is None:
        return header + payload
    return seals.out.seal(header) + payload if is_body else seals.out.seal(header, payload)


def sealed_all(seals: Seals | None, data: bytes) -> bytes:
    """The whole frames in `data`."""
    found, at = b"", 0
    while at < len(data):
        header = frames.unpack_header(data[at : at + HEADER_NBYTES], KINDS)
        end = at + HEADER_NBYTES + header.nbytes
        is_body = header.kind == FrameKind.BODY
        found += sealed(seals, data[at : at + HEADER_NBYTES], data[at + HEADER_NBYTES : end], is_body=is_body)
        at = end
    return found


def read_frame(sock: socket.socket, allowed: frozenset[FrameKind]) -> tuple[frames.Header, bytes]:
    """The next frame of a connection."""
    seals = sockets.seals_of(sock)
    head = sockets.recv_exactly(sock, HEADER_NBYTES + (SEAL_NBYTES if seals else 0))
    if seals is not None:
        seals.into.open_head(head)
    header = frames.unpack_header(head, allowed)
    payload = sockets.recv_exactly(sock, header.nbytes)
    if seals is not None and payload and header.kind != FrameKind.BODY:
        seals.into.open_payload(payload, sockets.recv_exactly(sock, MAC_NBYTES))
    return header, payload
