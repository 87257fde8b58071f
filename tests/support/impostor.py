"""A feeder that holds the key and does as it likes, beside the honest ones of a `Rig`."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from rig import JOB, Rig
from sealing import read_frame, sealed
from welcomes import welcome

from dataloaderjob.core import frames, handshake, sockets
from dataloaderjob.core.frames import FROM_RECEIVER, FrameKind, Header
from dataloaderjob.shipping.facts import facts

NAME, INSTANCE = "impostor", "i"


class Link:
    """A receiver's connection to it."""

    def __init__(self, sock: sockets.Connection) -> None:
        self.sock = sock

    def ticket(self) -> Header:
        """The next ticket that the receiver asks for."""
        while True:
            header, _ = read_frame(self.sock, FROM_RECEIVER)
            if header.kind == FrameKind.TICKET:
                return header

    def send(self, kind: int, about: Header, payload: bytes = b"", **fields: Any) -> None:
        fields = {"stream": about.stream, "ticket": about.ticket, "bundle": about.bundle, **fields}
        fields.setdefault("nbytes", len(payload))
        self.say(frames.pack_header(kind, **fields), payload, is_body=kind == FrameKind.BODY)

    def say(self, header: bytes, payload: bytes = b"", *, is_body: bool = False) -> None:
        """A frame, whatever its header says."""
        self.sock.sendall(sealed(self.sock.seals, header, payload, is_body=is_body))

    def trickle(self, data: bytes, every_s: float) -> None:
        """A byte at a time, until the receiver has enough of it."""
        for byte in data:
            self.sock.sendall(bytes([byte]))
            time.sleep(every_s)

    def listen(self) -> None:
        """Until the receiver ends the connection."""
        while self.sock.recv(1 << 16):
            pass


Deed = Callable[[Link], None]


class Doing:
    """A deed, and what came of it so far."""

    def __init__(self, deed: Deed, facts: Any) -> None:
        self.deed, self.facts = deed, facts
        self.greeted, self.done, self.ended = threading.Event(), threading.Event(), threading.Event()
        """A receiver came; the deed was done to one; one has ended its connection since."""


class Impostor:
    """Lets receivers in and does a deed to each, also when they come back."""

    def __init__(self, key: bytes) -> None:
        self._doing = Doing(Link.listen, {})
        self._key, self._listener = key, socket.create_server(("127.0.0.1", 0))
        self._links: set[socket.socket] = set()
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @contextmanager
    def doing(self, deed: Deed, said: Any = None) -> Iterator[Doing]:
        """`said`: what it says of itself, instead of what an honest feeder does."""
        self._doing = Doing(deed, {**facts(), "instance": INSTANCE} if said is None else said)
        yield self._doing
        self._doing = Doing(Link.listen, {})
        for sock in list(self._links):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock = sockets.Connection.of(self._listener.accept()[0])
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: sockets.Connection) -> None:
        doing = self._doing
        self._links.add(sock)
        with sock, contextlib.suppress(OSError):
            welcome(sock, self._key, job=JOB, facts=doing.facts, versions=handshake.DATA)
            doing.greeted.set()
            link = Link(sock)
            doing.deed(link)
            doing.done.set()
            link.listen()
        doing.ended.set()
        self._links.discard(sock)


class InfiltratedRig(Rig):
    """Its sidecar knows an impostor beside the feeders."""

    def __enter__(self) -> Self:
        self.impostor = Impostor((self.home / "key").read_bytes())
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.impostor.close()

    def endpoints(self) -> list[tuple[Any, ...]]:
        """One more stands at an address that cannot be."""
        return [
            *super().endpoints(),
            (NAME, INSTANCE, "127.0.0.1", self.impostor.port),
            ("nowhere", "n", "é" * 100, 1),
        ]
