"""The supervisor's port: a thread for each connection, whose role says what it is for (`core.supervision`).

Nothing here calls the provider: feeders and sidecars are told and heard while Ray is slow or gone.

Blobs pass here on their way from a trainer's node to the feeders' nodes. A blob is asked of a sidecar only when a
feeder lacks it: where feeders and trainer share a folder, none ever comes here. The threads of the server's
connections call `BlobRelay`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dataloaderjob.core import sockets, supervision
from dataloaderjob.core.blobs import NODE_KEEP_S, BlobStore, chunks
from dataloaderjob.core.errors import ProtocolError, RemoteProtocolError
from dataloaderjob.core.frames import MAX_BODY_NBYTES
from dataloaderjob.core.sockets import Acceptor
from dataloaderjob.supervisor.feeder_set import Endpoint

ASK_AGAIN_S = 10.0
"""A sidecar that was asked for a blob, and of which nothing comes for so long, is given up; another one is asked."""
WAIT_S = 60.0
"""A feeder that waits for so long, while no part of the blob comes, is told "gone" and asks again while it has tickets
for that blob."""

Want = Callable[[str], None]
"""Sends {"type": "want"} to one sidecar. Raises OSError."""
log = logging.getLogger(__name__)
SEND_TIMEOUT_S = 5
"""A peer that takes in nothing for so long is dropped; it connects again when it lives."""
IDLE_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Upload:
    """A blob on its way from a sidecar."""

    holder: int
    asked_at: float
    """When it was asked for, or a part of it came last."""
    moved_at: float
    """When a part of it came last, of this upload or an earlier one."""
    tried: set[int]


class BlobRelay:
    """Who has which blob, and who waits for one."""

    def __init__(self, folder: Path) -> None:
        self._store = BlobStore(folder)
        self._changed = threading.Condition()
        self._holders: dict[str, dict[int, Want]] = {}
        self._uploads: dict[str, _Upload] = {}
        """Blobs that were asked for and are not here: all feeders that miss one wait for the same upload."""

    def has(self, holder: int, digest: str, want: Want) -> None:
        """A sidecar can upload this blob."""
        self._store.path(digest)  # refuses what is no digest
        with self._changed:
            self._holders.setdefault(digest, {})[holder] = want
            self._changed.notify_all()

    def gone(self, holder: int) -> None:
        """A sidecar's connection ended."""
        with self._changed:
            for digest in list(self._holders):
                self._holders[digest].pop(holder, None)
                if not self._holders[digest]:
                    del self._holders[digest]

    def receive(self, sock: socket.socket, digest: str, nbytes: int) -> None:
        """Takes in an upload. Raises OSError, RemoteProtocolError when it is not what was promised."""
        if self._store.has(digest, nbytes):
            for _ in chunks(sock, nbytes):
                pass
        else:
            self._store.sweep(set(), NODE_KEEP_S)
            self._store.write(digest, self._moving(digest, chunks(sock, nbytes)))
        with self._changed:
            self._uploads.pop(digest, None)
            self._changed.notify_all()

    def serve(self, sock: socket.socket, digest: str, nbytes: int) -> None:
        """Answers a feeder's request, asking sidecars for the blob if it is not here. Raises OSError."""
        if not self._wait(digest, nbytes):
            sockets.send_message(sock, {"type": "gone"})
            return
        sockets.send_message(sock, {"type": "blob", "digest": digest, "nbytes": nbytes})
        with self._store.path(digest).open("rb") as data:
            os.utime(data.fileno())  # not to be swept: another feeder may ask next
            sock.sendfile(data)

    def _wait(self, digest: str, nbytes: int) -> bool:
        begun = time.monotonic()
        while not self._store.has(digest, nbytes):
            now = time.monotonic()
            with self._changed:
                upload = self._uploads.get(digest)
                if now - max(begun, upload.moved_at if upload else begun) > WAIT_S:
                    return False
                want = self._whom_to_ask(digest, now)
            if want is not None:
                try:
                    want(digest)
                except OSError:
                    with self._changed:
                        if (upload := self._uploads.get(digest)) is not None:
                            upload.asked_at = 0.0
                    continue
            with self._changed:
                if not self._store.has(digest, nbytes):
                    self._changed.wait(1.0)
        return True

    def _whom_to_ask(self, digest: str, now: float) -> Want | None:
        """A sidecar that is to upload a blob; None while one does, or has just been asked."""
        upload, holders = self._uploads.get(digest), self._holders.get(digest, {})
        if upload is not None and upload.holder in holders and now - upload.asked_at < ASK_AGAIN_S:
            return None
        tried = set() if upload is None else upload.tried
        if not set(holders) - tried:  # all were: each gets another chance, who was asked last the last
            tried = set() if upload is None or len(holders) == 1 else {upload.holder}
        found = next((number for number in holders if number not in tried), None)
        if found is None:
            return None
        moved_at = 0.0 if upload is None else upload.moved_at
        self._uploads[digest] = _Upload(found, now, moved_at, tried | {found})
        return holders[found]

    def _moving(self, digest: str, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Notes that parts come."""
        for piece in pieces:
            if (upload := self._uploads.get(digest)) is not None:
                upload.asked_at = upload.moved_at = time.monotonic()
            yield piece


Witness = tuple[str, str]
"""Sidecar and rank of a receiver that cannot connect to a feeder."""


class SupervisorState(Protocol):
    """What the connections tell the supervisor and ask of it. Called from many threads."""

    def feeder_ready(self, endpoint: Endpoint) -> bool: ...
    def feeder_left(self, name: str, instance: str) -> None: ...
    def feeder_drained(self, name: str, instance: str) -> None: ...
    def replace(self, name: str, instance: str, reason: str, witness: Witness | None) -> None: ...
    def metrics(self, sidecar: str, metrics: dict[str, Any] | None) -> None: ...
    def listing(self) -> dict[str, Any]: ...
    def control(self, message: dict[str, Any]) -> dict[str, Any]: ...


class _Peer:
    """A connection after its handshake."""

    def __init__(self, number: int, sock: socket.socket, name: str) -> None:
        self.number, self.sock, self.name = number, sock, name
        self._lock = threading.Lock()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))

    def send(self, make: Callable[[], dict[str, Any]]) -> None:
        """Sends what `make` returns; made under the lock, so that the newest goes last. Raises OSError."""
        with self._lock:
            sockets.send_message(self.sock, make())


class SupervisorServer:
    """All connections of the supervisor."""

    def __init__(
        self, host: str, port: int, *, key: bytes, job: str, blob_folder: Path, state: SupervisorState
    ) -> None:
        """Binds the port. Raises OSError when it is taken."""
        self._state = state
        self._relay = BlobRelay(blob_folder)
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._sidecars: dict[int, _Peer] = {}
        self._feeders: dict[str, _Peer] = {}
        self._roles = {
            "sidecar": self._sidecar,
            "feeder": self._feeder,
            "blob": self._blob,
            "control": self._control,
        }
        self._acceptor = Acceptor(host, port, key=key, job=job, facts={}, welcomed=self._welcomed)
        threading.Thread(target=self._accept_forever, name="dlj-supervisor", daemon=True).start()

    @property
    def port(self) -> int:
        return self._acceptor.port

    def publish(self) -> None:
        """Tells every sidecar the list of feeders as it is now."""
        with self._lock:
            peers = list(self._sidecars.values())
        for peer in peers:
            try:
                peer.send(self._state.listing)
            except OSError:
                with contextlib.suppress(OSError):
                    peer.sock.shutdown(socket.SHUT_RDWR)

    def drain(self, instance: str) -> None:
        """Asks a feeder to say when nothing is owed to anybody."""
        with self._lock:
            peer = self._feeders.get(instance)
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.send(lambda: {"type": "drain"})

    def _accept_forever(self) -> None:
        while True:
            select.select([self._acceptor.sock], [], [], 1.0)
            self._acceptor.accept_all()
            self._acceptor.expire()

    def _welcomed(self, sock: socket.socket, answer: dict[str, Any]) -> None:
        """Serves in the handshake's thread, which is the connection's from here on."""
        peer = _Peer(next(self._numbers), sock, str(answer.get("name")))
        serve = self._roles.get(str(answer.get("role")))
        try:
            if serve is None:
                raise RemoteProtocolError(f"role {answer.get('role')!r} is not known to the supervisor")
            serve(peer)
        except ProtocolError as exc:
            log.warning("the connection of %s is closed: %s", peer.name, exc)
        except OSError as exc:
            log.debug("the connection of %s ended: %s", peer.name, exc)
        finally:
            sock.close()

    def _sidecar(self, peer: _Peer) -> None:
        with self._lock:
            self._sidecars[peer.number] = peer
        try:
            peer.send(self._state.listing)
            while True:
                self._receive_sidecar(peer, sockets.recv_message(peer.sock))
        finally:
            with self._lock:
                del self._sidecars[peer.number]
                over = all(other.name != peer.name for other in self._sidecars.values())
            self._relay.gone(peer.number)
            if over:
                self._state.metrics(peer.name, None)

    def _receive_sidecar(self, peer: _Peer, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "metrics":
            self._state.metrics(peer.name, message)
        elif kind == "have":
            digest = supervision.text(message, "digest")
            self._relay.has(peer.number, digest, lambda d: peer.send(lambda: {"type": "want", "digest": d}))
        elif kind == "replace":
            name, instance = supervision.text(message, "name"), supervision.text(message, "instance")
            # A sidecar of the release before says nothing of connections: it meant feeders that hang as well.
            witness = None if message.get("connected", True) else (peer.name, str(message.get("receiver")))
            self._state.replace(name, instance, supervision.text(message, "reason"), witness)
        else:
            raise RemoteProtocolError(f"a sidecar may not send {kind!r}")

    def _feeder(self, peer: _Peer) -> None:
        message = sockets.recv_message(peer.sock)
        endpoint = Endpoint(
            peer.name,
            supervision.text(message, "instance"),
            supervision.text(message, "host"),
            supervision.number(message, "port", 65535),
            supervision.number(message, "pid", 1 << 31),
            supervision.text(message, "node"),
            supervision.text(message, "session"),
        )
        with self._lock:
            self._feeders[endpoint.instance] = peer
        try:
            if not self._state.feeder_ready(endpoint):
                return
            while True:
                if sockets.recv_message(peer.sock).get("type") == "drained":
                    self._state.feeder_drained(endpoint.name, endpoint.instance)
        finally:
            with self._lock:
                newest = self._feeders.get(endpoint.instance) is peer
                if newest:
                    del self._feeders[endpoint.instance]
            if newest:
                self._state.feeder_left(endpoint.name, endpoint.instance)

    def _blob(self, peer: _Peer) -> None:
        peer.sock.settimeout(IDLE_TIMEOUT_S)
        message = sockets.recv_message(peer.sock)
        digest = supervision.text(message, "digest")
        nbytes = supervision.number(message, "nbytes", MAX_BODY_NBYTES)
        if message.get("type") == "get":
            self._relay.serve(peer.sock, digest, nbytes)
            return
        started = time.monotonic()
        self._relay.receive(peer.sock, digest, nbytes)
        log.info("%s uploaded %.1f MB in %.1f s", peer.name, nbytes / 1e6, time.monotonic() - started)
        sockets.send_message(peer.sock, {"type": "stored"})

    def _control(self, peer: _Peer) -> None:
        while True:
            answer = self._state.control(sockets.recv_message(peer.sock))
            sockets.send_message(peer.sock, answer)
