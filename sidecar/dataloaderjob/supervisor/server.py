"""The supervisor's port, with a thread for each connection. A connection's role states its purpose
(`core.supervision`).

The role's key (`core.keys`) decides what a peer may ask for. Each command and its result are logged. Nothing here calls
the provider, so feeders and sidecars are served even while Ray is slow or gone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dataloaderjob.core import costs, keys, sockets, supervision
from dataloaderjob.core.acceptor import Acceptor
from dataloaderjob.core.crowds import Places
from dataloaderjob.core.errors import ProtocolError, RemoteProtocolError
from dataloaderjob.core.frames import MAX_BODY_NBYTES
from dataloaderjob.core.keys import Holder
from dataloaderjob.core.sockets import Connection
from dataloaderjob.core.supervision import Cause
from dataloaderjob.core.texts import clean
from dataloaderjob.supervisor.blob_relay import IDLE_TIMEOUT_S, BlobRelay
from dataloaderjob.supervisor.feeder_set import MAX_WHY, Endpoint

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

log = logging.getLogger(__name__)
MAX_COMMAND = 200
MAX_FIELD = 253
"""Maximum length of a text in a feeder's report about itself. All sidecars receive some of these texts."""
MAX_METRICS_NBYTES = 1 << 20
"""Maximum size of a message from a sidecar."""
_OF_FEEDERS = ("feeder", "blob")
"""The roles that the feeders' key permits."""
SEND_TIMEOUT_S = 5
"""Seconds after which a peer that reads nothing is dropped. If it is alive, it reconnects."""


Process = tuple[str, str]
"""A feeder's name and the instance of its process."""
Witness = tuple[str, str]
"""The sidecar and rank of a receiver that cannot connect to a feeder."""


class SupervisorState(Protocol):
    """The supervisor's interface for its connections. Many threads call it."""

    def feeder_ready(self, endpoint: Endpoint) -> bool: ...
    def feeder_left(self, name: str, instance: str) -> None: ...
    def feeder_trouble(self, name: str, cause: Cause, why: str) -> None: ...
    def feeder_drained(self, name: str, instance: str) -> None: ...
    def replace(self, name: str, instance: str, reason: str, witness: Witness | None) -> bool: ...
    def costs(self, instance: str, costs: dict[str, int] | None) -> None: ...
    def metrics(self, sidecar: str, metrics: dict[str, Any] | None) -> None: ...
    def listing(self) -> dict[str, Any]: ...
    def control(self, message: dict[str, Any]) -> dict[str, Any]: ...


class _Peer:
    """A connection after its handshake."""

    def __init__(self, number: int, sock: Connection, answer: dict[str, Any]) -> None:
        self.number, self.sock = number, sock
        self.name, self.role = clean(answer.get("name"), MAX_COMMAND), str(answer.get("role"))
        self.protocol = int(answer["protocol"])
        self.host, port = sock.getpeername()[:2]
        self.address = sockets.address_text(self.host, port)
        sock.max_message_nbytes = (
            MAX_METRICS_NBYTES if self.role == "sidecar" else supervision.MAX_REQUEST_NBYTES
        )
        self._lock = threading.Lock()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))

    def send(self, make: Callable[[], dict[str, Any]]) -> None:
        """Sends the message that `make` returns. `make` is called under the lock, so the newest message is sent last.
        Raises OSError."""
        with self._lock:
            sockets.send_message(self.sock, make())


class SupervisorServer:
    """The server for all connections to the supervisor."""

    def __init__(
        self, host: str, port: int, *, job_key: bytes, job: str, blob_folder: Path, state: SupervisorState,
        tls: Credentials | None = None,
    ) -> None:  # fmt: skip
        """Binds the port. Raises OSError if it is taken."""
        self._job_key, self._sidecars_key = job_key, keys.derive(job_key, Holder.SIDECAR)
        self._state = state
        self._relay = BlobRelay(blob_folder)
        self._lock = threading.Lock()
        self._places = Places(supervision.MAX_OF_FEEDERS)
        self._numbers = itertools.count(1)
        self._sidecars: dict[int, _Peer] = {}
        self._feeders: dict[Process, _Peer] = {}
        self._roles = {
            "sidecar": self._sidecar,
            "feeder": self._feeder,
            "blob": self._blob,
            "upload": self._upload,
            "control": self._control,
        }
        self._acceptor = Acceptor(
            host, port, key=keys.of_job(job_key), job=job, facts={}, welcomed=self._welcomed, tls=tls
        )
        threading.Thread(target=self._accept_forever, name="dlj-supervisor", daemon=True).start()

    @property
    def port(self) -> int:
        return self._acceptor.port

    def publish(self) -> None:
        """Sends the current list of feeders to every sidecar."""
        with self._lock:
            peers = list(self._sidecars.values())
        for peer in peers:
            try:
                peer.send(self._state.listing)
            except OSError:
                with contextlib.suppress(OSError):
                    peer.sock.shutdown(socket.SHUT_RDWR)

    def drain(self, process: Process) -> None:
        """Asks a feeder to report once it has no work left."""
        with self._lock:
            peer = self._feeders.get(process)
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.send(lambda: {"type": "drain"})

    def _accept_forever(self) -> None:
        poll = select.poll()
        poll.register(self._acceptor, select.POLLIN)
        while True:
            poll.poll(1000)
            self._acceptor.serve()
            self._acceptor.expire()

    def _welcomed(self, sock: Connection, answer: dict[str, Any]) -> None:
        """Serves a connection after its handshake, in the connection's own thread."""
        name = clean(answer.get("name"), MAX_COMMAND)
        try:
            peer = _Peer(next(self._numbers), sock, answer)
            serve = self._roles.get(peer.role)
            if serve is None:
                raise RemoteProtocolError(f"role {peer.role!r} is not known to the supervisor")
            if peer.role in _OF_FEEDERS:
                self._serve_feeder(peer, serve)
            else:
                serve(peer)
        except ProtocolError as exc:
            log.warning("closed the connection of %s: %s", name, exc)
        except OSError as exc:
            log.debug("the connection of %s ended: %s", name, exc)
        finally:
            sock.close()

    def _serve_feeder(self, peer: _Peer, serve: Callable[[_Peer], None]) -> None:
        with self._places.one(peer.host) as free:
            if not free:
                raise RemoteProtocolError(
                    f"feeders may have at most {supervision.MAX_OF_FEEDERS} connections from one address, and "
                    f"{peer.host} already has that many"
                )
            serve(peer)

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
            # A sidecar of the previous release does not send `connected`. Its reports count as reports of a hang.
            witness = None if message.get("connected", True) else (peer.name, str(message.get("receiver")))
            done = self._state.replace(name, instance, supervision.text(message, "reason"), witness)
            self._told(peer, f"replace {name} ({instance})", "ok" if done else "not done")
        else:
            raise RemoteProtocolError(f"a sidecar may not send {kind!r}")

    def _feeder(self, peer: _Peer) -> None:
        message = sockets.recv_message(peer.sock)
        if message.get("type") == "ended":
            self._trouble(peer, message)
            return
        endpoint = self._endpoint(peer, message)
        process = endpoint.name, endpoint.instance
        with self._lock:
            self._feeders[process] = peer
        ready = False
        try:
            ready = self._state.feeder_ready(endpoint)
            while ready:
                message = sockets.recv_message(peer.sock)
                if message.get("type") == "drained":
                    self._state.feeder_drained(endpoint.name, endpoint.instance)
                elif message.get("type") == "trouble":
                    self._trouble(peer, message)
                elif message.get("type") == "costs":
                    self._state.costs(endpoint.instance, costs.parse(message.get("costs")))
        finally:
            with self._lock:
                newest = self._feeders.get(process) is peer
                if newest:
                    del self._feeders[process]
            if ready:  # otherwise, the instance and the address may be another feeder's
                self._relay.left((endpoint.host, endpoint.port))
                self._state.costs(endpoint.instance, None)
                if newest:
                    self._state.feeder_left(endpoint.name, endpoint.instance)

    def _endpoint(self, peer: _Peer, message: dict[str, Any]) -> Endpoint:
        """Parses a feeder's report about itself. Raises ProtocolError."""
        return Endpoint(
            peer.name,
            supervision.text(message, "instance", MAX_FIELD),
            supervision.host_of(message, peer.host),
            supervision.number(message, "port", 65535),
            supervision.number(message, "pid", 1 << 31),
            supervision.text(message, "node", MAX_FIELD),
            supervision.text(message, "session", MAX_FIELD),
            self._link(peer.name, message),
        )

    def _link(self, name: str, message: dict[str, Any]) -> str:
        """Returns the key for connections to a feeder, wrapped for sidecars; empty if the feeder's release has no such
        keys. Raises AuthError."""
        if "link" not in message:
            return ""
        about = supervision.text(message, "instance")
        key = keys.unwrap(keys.of_feeder(self._job_key, name), supervision.text(message, "link"), about)
        return keys.wrap(self._sidecars_key, key, about)

    def _trouble(self, peer: _Peer, message: dict[str, Any]) -> None:
        cause = supervision.text(message, "cause")
        if cause in set(Cause):  # a feeder of a later release may know more causes
            self._state.feeder_trouble(
                peer.name, Cause(cause), clean(supervision.text(message, "why"), MAX_WHY)
            )

    def _blob(self, peer: _Peer) -> None:
        message, digest, nbytes = _blob_message(peer)
        if message.get("type") == "get":
            self._relay.serve(peer.sock, digest, nbytes, _address(message, peer.host))
        elif peer.protocol < keys.SINCE:  # sidecars of the previous release upload in this role
            self._receive_blob(peer, digest, nbytes)
        else:
            raise RemoteProtocolError(f"a feeder may not send {message.get('type')!r}")

    def _upload(self, peer: _Peer) -> None:
        _, digest, nbytes = _blob_message(peer)
        self._receive_blob(peer, digest, nbytes)

    def _receive_blob(self, peer: _Peer, digest: str, nbytes: int) -> None:
        started = time.monotonic()
        self._relay.receive(peer.sock, digest, nbytes)
        log.info("%s uploaded %.1f MB in %.1f s", peer.name, nbytes / 1e6, time.monotonic() - started)
        sockets.send_message(peer.sock, {"type": "stored"})

    def _control(self, peer: _Peer) -> None:
        while True:
            message = sockets.recv_message(peer.sock)
            answer = self._state.control(message)
            if message.get("type") != "status":
                what = f"{message.get('type')} {message.get('feeders', '')}".strip()
                self._told(peer, what, str(answer.get("message", answer["type"])))
            sockets.send_message(peer.sock, answer)

    def _told(self, peer: _Peer, what: str, result: str) -> None:
        """Logs a command and its result."""
        log.info(
            "command %s from role %s, %s at %s: %s",
            clean(what, MAX_COMMAND), peer.role, peer.name, peer.address, clean(result, MAX_WHY),
        )  # fmt: skip


def _blob_message(peer: _Peer) -> tuple[dict[str, Any], str, int]:
    """Receives the message that begins a blob's transfer. Returns the message, the digest and the size in bytes."""
    peer.sock.settimeout(IDLE_TIMEOUT_S)
    message = sockets.recv_message(peer.sock)
    digest = supervision.text(message, "digest")
    return message, digest, supervision.number(message, "nbytes", MAX_BODY_NBYTES)


def _address(message: dict[str, Any], peer: str) -> tuple[str, int] | None:
    """Returns the address at which a feeder will serve the blob; None if it will not, as in the previous release.
    `peer`: the address from which the feeder connected. Raises RemoteProtocolError."""
    if "host" not in message:
        return None
    return supervision.host_of(message, peer), supervision.number(message, "port", 65535)
