"""Blobs between nodes: a feeder gets those that its node lacks from the supervisor, or from the feeder that it names,
and hands on what its node has. `supervisor.blob_relay` is the other end.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dataloaderjob.core import sockets, supervision
from dataloaderjob.core.blobs import MAX_NBYTES, SLOWEST, BlobStore, chunks
from dataloaderjob.core.errors import ProtocolError, RemoteProtocolError, ServiceError
from dataloaderjob.core.settings import FeederSettings

log = logging.getLogger(__name__)

STALL_TIMEOUT_S = 30.0
"""No byte of a blob for so long: the connection is given up and the blob asked for again."""

PEER_ERRORS = (ConnectionError, TimeoutError, ProtocolError)
"""Say something of the other feeder, or of the way to it; other errors are this node's own."""


def connect_to_supervisor(settings: FeederSettings, key: bytes, role: str) -> socket.socket:
    """A connection to the supervisor after the handshake. Raises OSError, ProtocolError."""
    if settings.supervisor_host is None:
        raise ServiceError(f"{settings.name} has no supervisor to ask")
    address = settings.supervisor_host, settings.supervisor_port
    return sockets.connect(address, key, role=role, name=settings.name, job=settings.job)


class BlobFetcher:
    """Brings blobs to the node's folder, each once for all feeders there."""

    def __init__(
        self, settings: FeederSettings, key: bytes, store: BlobStore, address: Callable[[], tuple[str, int]]
    ):
        """`address`: where this feeder hands on what it has got (`serve`)."""
        self._settings, self._key, self._store, self._address = settings, key, store, address

    def fetch(self, digest: str, nbytes: int, *, wanted: Callable[[], bool]) -> bool:
        """Returns False when nobody wants it any more, or nobody has it yet. Raises OSError, ProtocolError."""
        host, port = self._address()
        request = {"type": "get", "digest": digest, "nbytes": nbytes, "host": host, "port": port}
        with self._store.lock(digest):
            if self._store.has(digest, nbytes):
                return True
            with connect_to_supervisor(self._settings, self._key, "blob") as sock:
                while not self._store.has(digest, nbytes):
                    sock.settimeout(None)
                    sockets.send_message(sock, request)
                    # A dataset that opens many files has descriptors that select() does not take.
                    poll = select.poll()
                    poll.register(sock, select.POLLIN)
                    while not poll.poll(1000):
                        if not wanted():
                            return False
                    answer = self._receive(sock, digest, nbytes)
                    if answer.get("type") == "peer":
                        self._fetch_from_peer(answer, request)
                    elif answer.get("type") != "blob":
                        return False
                # A supervisor of the release before does not listen any more.
                with contextlib.suppress(OSError):
                    sockets.send_message(sock, {"type": "stored"})
        return True

    def _receive(self, sock: socket.socket, digest: str, nbytes: int) -> dict[str, Any]:
        """The answer to a request, whose blob is stored if it came."""
        sock.settimeout(STALL_TIMEOUT_S)
        answer = sockets.recv_message(sock)
        if answer.get("type") == "blob":
            deadline = time.monotonic() + STALL_TIMEOUT_S + nbytes / SLOWEST
            self._store.write(digest, _until(deadline, chunks(sock, nbytes)))
        return answer

    def _fetch_from_peer(self, answer: dict[str, Any], request: dict[str, Any]) -> None:
        """A feeder that does not have it any more, or is gone, is told to the supervisor by asking once more."""
        address = supervision.text(answer, "host"), supervision.number(answer, "port", 65535)
        try:
            with sockets.connect(
                address, self._key, role="blob", name=self._settings.name, job=self._settings.job,
                versions=sockets.DATA,
            ) as sock:  # fmt: skip
                sockets.send_message(sock, request)
                self._receive(sock, request["digest"], request["nbytes"])
        except PEER_ERRORS as exc:
            log.info("a blob did not come from the feeder at %s: %s", sockets.address_text(*address), exc)

    def serve(self, sock: socket.socket) -> None:
        """Hands a blob on to the feeder that has connected; owns the connection, which ends with it."""
        with sock:
            try:
                sock.settimeout(STALL_TIMEOUT_S)
                message = sockets.recv_message(sock)
                digest, nbytes = (
                    supervision.text(message, "digest"),
                    supervision.number(message, "nbytes", MAX_NBYTES),
                )
                if not self._store.has(digest, nbytes):
                    raise RemoteProtocolError(f"blob {digest[:8]} is not here")
                self._store.send(sock, digest, nbytes)
            except (OSError, ProtocolError) as exc:
                log.info("%s: a blob was not handed on: %s", self._settings.name, exc)


def _until(deadline: float, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a blob comes with less than {SLOWEST / 1e6:g} MB/s")
        yield piece
