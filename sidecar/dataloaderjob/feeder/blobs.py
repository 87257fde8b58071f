"""The transfer of blobs between nodes. A feeder fetches missing blobs from the supervisor, or from another feeder that
the supervisor names. It serves its node's blobs to other feeders. `supervisor.blob_relay` is the other end.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dataloaderjob.core import handshake, sockets, supervision
from dataloaderjob.core.blobs import MAX_NBYTES, SLOWEST, BlobStore, chunks
from dataloaderjob.core.crowds import Places
from dataloaderjob.core.errors import ProtocolError, RemoteProtocolError, ServiceError
from dataloaderjob.core.keys import Part
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.core.sockets import Connection

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

log = logging.getLogger(__name__)

STALL_TIMEOUT_S = 30.0
"""Seconds without a byte of a blob after which the connection is closed, and the blob is requested again."""

PEER_ERRORS = (ConnectionError, TimeoutError, ProtocolError)
"""Errors that the other feeder, or the network in between, may have caused. All other errors have a cause on this
node."""


def connect_to_supervisor(settings: FeederSettings, key: bytes, tls: Credentials | None) -> Connection:
    """Returns a connection to the supervisor, after the handshake. Raises OSError, ProtocolError."""
    if settings.supervisor_host is None:
        raise ServiceError(f"{settings.name} has no supervisor to fetch it from")
    address = settings.supervisor_host, settings.supervisor_port
    return handshake.connect(
        address, key, role="blob", name=settings.name, job=settings.job, versions=handshake.BY_ROLE,
        tls=tls,
    )  # fmt: skip


class BlobFetcher:
    """A fetcher of blobs into the node's folder. Each blob is fetched once for all feeders of the node."""

    def __init__(
        self, settings: FeederSettings, key: bytes, store: BlobStore, address: Callable[[], tuple[str, int]],
        tls: Credentials | None = None,
    ) -> None:  # fmt: skip
        """`address`: returns the host and port at which this feeder serves its blobs to others (`serve`)."""
        self._tls = tls
        self._places = Places(supervision.MAX_OF_FEEDERS)
        self._settings, self._key, self._store, self._address = settings, key, store, address

    def fetch(self, digest: str, nbytes: int, *, wanted: Callable[[], bool]) -> bool:
        """Fetches a blob. Returns False if it is no longer wanted, or if nobody has it yet. Raises OSError,
        ProtocolError."""
        host, port = self._address()
        request = {"type": "get", "digest": digest, "nbytes": nbytes, "host": host, "port": port}
        with self._store.lock(digest):
            if self._store.has(digest, nbytes):
                return True
            with connect_to_supervisor(self._settings, self._key, self._tls) as sock:
                while not self._store.has(digest, nbytes):
                    sock.settimeout(None)
                    sockets.send_message(sock, request)
                    # With many open files, a file descriptor may be too large for select().
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
                # A supervisor of the previous release does not expect this message.
                with contextlib.suppress(OSError):
                    sockets.send_message(sock, {"type": "stored"})
        return True

    def _receive(self, sock: socket.socket, digest: str, nbytes: int) -> dict[str, Any]:
        """Returns the answer to a request. If a blob follows the answer, it is stored first."""
        sock.settimeout(STALL_TIMEOUT_S)
        answer = sockets.recv_message(sock)
        if answer.get("type") == "blob":
            deadline = time.monotonic() + STALL_TIMEOUT_S + nbytes / SLOWEST
            self._store.write(digest, _until(deadline, chunks(sock, nbytes)))
        return answer

    def _fetch_from_peer(self, answer: dict[str, Any], request: dict[str, Any]) -> None:
        """Fetches a blob from another feeder. If that fails, the caller's next request reports it to the supervisor."""
        address = supervision.text(answer, "host"), supervision.number(answer, "port", 65535)
        try:
            with handshake.connect(
                address, self._key, role="blob", name=self._settings.name, job=self._settings.job,
                versions=handshake.DATA, tls=self._tls, to=Part.FEEDER,
            ) as sock:  # fmt: skip
                sockets.send_message(sock, request)
                self._receive(sock, request["digest"], request["nbytes"])
        except PEER_ERRORS as exc:
            log.info("did not receive a blob from the feeder at %s: %s", sockets.address_text(*address), exc)

    def serve(self, sock: Connection) -> None:
        """Sends a blob to the feeder that has connected. Takes ownership of the connection and closes it afterwards."""
        sock.max_message_nbytes = supervision.MAX_REQUEST_NBYTES
        with sock:
            try:
                sock.settimeout(STALL_TIMEOUT_S)
                with self._places.one(str(sock.getpeername()[:1])) as free:
                    if not free:
                        raise RemoteProtocolError(
                            f"feeders may have at most {supervision.MAX_OF_FEEDERS} connections from one address, and "
                            "this one already has that many"
                        )
                    self._serve(sock)
            except (OSError, ProtocolError) as exc:
                log.info("%s: a blob was not sent to another feeder: %s", self._settings.name, exc)

    def _serve(self, sock: Connection) -> None:
        message = sockets.recv_message(sock)
        digest, nbytes = (
            supervision.text(message, "digest"),
            supervision.number(message, "nbytes", MAX_NBYTES),
        )
        if not self._store.has(digest, nbytes):
            raise RemoteProtocolError(f"this feeder does not have blob {digest[:8]}")
        self._store.send(sock, digest, nbytes)


def _until(deadline: float, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a blob is arriving at less than {SLOWEST / 1e6:g} MB/s")
        yield piece
