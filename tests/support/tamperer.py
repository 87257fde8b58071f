"""A relay of TCP connections that changes what one side says to the other, once, and hands on all else as it is."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Iterator
from typing import Any

from middleman import Carry, Middleman
from rig import Rig
from sealing import KINDS

from dataloaderjob.core import frames, sockets
from dataloaderjob.core.frames import HEADER_NBYTES, FrameKind
from dataloaderjob.core.seals import MAC_NBYTES, SEAL_NBYTES

AT = 4
"""Number of the frame to which a deed is done."""
Frames = Iterator[bytes]
Deed = Callable[[Frames, list[bytes]], Frames]
"""What is handed on of the frames of a connection. The list has those of the connection before it."""
Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Another message in place of one of the handshake."""
HANDSHAKE = ("challenge", "answer", "last")


def altered(offset: int, at: int = AT) -> Deed:
    """One bit of a frame is another; the offset counts from the end if it is negative."""

    def deed(sent: Frames, _: list[bytes]) -> Frames:
        for number, frame in enumerate(sent):
            data = bytearray(frame)
            if number == at:
                data[offset] ^= 1
            yield bytes(data)

    return deed


def dropped(sent: Frames, _: list[bytes]) -> Frames:
    return (frame for number, frame in enumerate(sent) if number != AT)


def repeated(sent: Frames, _: list[bytes]) -> Frames:
    for number, frame in enumerate(sent):
        yield from [frame] * (2 if number == AT else 1)


def swapped(sent: Frames, _: list[bytes]) -> Frames:
    for number, frame in enumerate(sent):
        if number == AT:
            yield next(sent)
        yield frame


def spliced(sent: Frames, before: list[bytes]) -> Frames:
    for number, frame in enumerate(sent):
        yield before[AT] if number == AT else frame


def as_is(sent: Frames, _: list[bytes]) -> Frames:
    return sent


def size_of_frame(head: bytes) -> int:
    header = frames.unpack_header(head, KINDS)
    return header.nbytes + (MAC_NBYTES if header.nbytes and header.kind != FrameKind.BODY else 0)


def size_of_message(head: bytes) -> int:
    return int(sockets.LENGTH.unpack_from(head)[0]) + MAC_NBYTES


class Tamperer(Middleman):
    """Connects those who connect to it with `address`."""

    def __init__(self, address: tuple[str, int], *, carries_frames: bool) -> None:
        """`carries_frames`: frames follow the handshake, and not messages."""
        self._head_nbytes = (HEADER_NBYTES if carries_frames else sockets.LENGTH.size) + SEAL_NBYTES
        self._size_of = size_of_frame if carries_frames else size_of_message
        self._deed, self._to_acceptor = as_is, True
        self._changes: dict[str, Change] = {}
        self._before: dict[bool, list[bytes]] = {True: [], False: []}
        super().__init__(address)

    def arm(self, deed: Deed = as_is, *, to_acceptor: bool = True, **changes: Change) -> None:
        """Ends all connections. To the next, the deed is done, or these messages of the handshake are changed."""
        self._deed, self._to_acceptor, self._changes = deed, to_acceptor, changes
        self.cut()

    def carriers(self, near: socket.socket, far: socket.socket) -> Iterator[Carry]:
        changes, self._changes = self._changes, {}
        deed, self._deed = self._deed, as_is
        for source, target, to_acceptor in ((near, far, True), (far, near, False)):
            done = deed if to_acceptor == self._to_acceptor else as_is
            said = ("answer",) if to_acceptor else ("challenge", "last")
            pairs = [(name, changes.get(name, lambda message: message)) for name in said]
            yield functools.partial(self._carry, source, target, to_acceptor, done, dict(pairs))

    def _carry(
        self,
        source: socket.socket,
        target: socket.socket,
        to_acceptor: bool,
        deed: Deed,
        said: dict[str, Change],
    ) -> None:
        before, here = self._before[to_acceptor], list[bytes]()
        with contextlib.suppress(OSError):
            for change in said.values():
                message = sockets.recv_message(source)
                target.sendall(sockets.pack_message(message if "error" in message else change(message)))
            self._before[to_acceptor] = here
            for frame in deed(self._frames(source, here), before):
                target.sendall(frame)
        self.end(source, target)

    def _frames(self, source: socket.socket, kept: list[bytes]) -> Frames:
        while True:
            head = sockets.recv_exactly(source, self._head_nbytes)
            frame = head + sockets.recv_exactly(source, self._size_of(head))
            if len(kept) <= AT:
                kept.append(frame)
            yield frame


class TamperedRig(Rig):
    """Its sidecar reaches its one feeder through a relay."""

    def __init__(self, **sidecar: Any) -> None:
        super().__init__(1, shares_memory=False, **sidecar)
        self.tamperer: Tamperer

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.tamperer.close()

    def endpoints(self) -> list[tuple[Any, ...]]:
        ((name, instance, host, port),) = super().endpoints()
        self.tamperer = Tamperer((host, port), carries_frames=True)
        return [(name, instance, *self.tamperer.address)]
