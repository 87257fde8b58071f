"""The sidecar's connection to the supervisor, and the records of trainers' failures and bundles.

Over the connection, the sidecar receives the list of feeders and sends metrics and failures. If the supervisor is gone,
the sidecar continues with the feeders that it knows, and reconnects with back-off. It reports a trainer's failure until
the trainer has taken a later batch. It uploads user code and data on demand, and removes them when no trainer uses
them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dataloaderjob.core import handshake, keys, sockets
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.errors import ProtocolError
from dataloaderjob.core.processes import Backoff, close_all_but, default_signals, die_with_parent
from dataloaderjob.core.sockets import Connection, Inbox
from dataloaderjob.core.supervision import FIELDS
from dataloaderjob.sidecar.dispatch.streams import Endpoint
from dataloaderjob.sidecar.output import log

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

BACKOFF = Backoff(0.05, 3.0)
CONNECT_TIMEOUT_S = 0.5
"""Maximum time for which a hanging supervisor may delay attaching and health checks."""
UPLOAD_TIMEOUT_S = 60.0
KEEP_UNUSED_S = 120.0
"""Seconds for which unused blobs are kept. A trainer writes its blobs before it reports the bundle, and may have to
attach again in between."""
MAX_LOADERS = 16
"""Maximum number of loaders of one trainer whose last bundles are kept. Other loaders store their bundles again when
they are used."""


class SupervisorClient:
    """The sidecar's client of the supervisor. `fileno` is None while there is no connection."""

    def __init__(
        self, address: tuple[str, int], *, key: bytes, job: str, name: str, store: BlobStore,
        tls: Credentials | None = None,
    ) -> None:  # fmt: skip
        self.address = address
        self.feeders: list[Endpoint] = []
        self.desired: int | None = None
        self.notes: list[str] = []
        self.out_of_memory: list[str] = []
        """Names of feeders that ran out of memory recently."""
        self.known = False
        """True once a list of feeders has arrived."""
        self.why = ""
        """The reason why there is no connection; empty while there is one."""
        self._key, self._job, self._name = key, job, name
        self._store = store
        self._tls = tls
        self._sock: Connection | None = None
        self._in = Inbox()
        self._out = bytearray()
        self.retry_at = 0.0
        """Earliest time of the next attempt to connect."""
        self._failures = 0
        self._have: dict[str, int] = {}

    @property
    def fileno(self) -> int | None:
        return None if self._sock is None else self._sock.fileno()

    def try_connect(self, now: float) -> bool:
        """Connects if the next attempt is due, and returns True on success. A short wait is allowed, because this
        process is outside the data path."""
        if self._sock is not None or now < self.retry_at:
            return False
        try:
            sock = handshake.connect(
                self.address, self._key, role="sidecar", name=self._name, job=self._job,
                versions=handshake.BY_ROLE, timeout_s=CONNECT_TIMEOUT_S, tls=self._tls,
            )  # fmt: skip
        except (OSError, ProtocolError) as exc:
            self.why = f"the job's supervisor at {self.address[0]}:{self.address[1]} cannot be reached: {exc}"
            self._failures += 1
            self.retry_at = now + BACKOFF.spread_s(self._failures)
            return False
        sock.setblocking(False)
        self._sock, self._failures, self.why = sock, 0, ""
        self._in = Inbox(sock.seals)
        self._out.clear()
        for digest, nbytes in self._have.items():
            self._queue({"type": "have", "digest": digest, "nbytes": nbytes})
        return True

    def close(self, now: float) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock, self.retry_at = None, now + BACKOFF.spread_s(max(1, self._failures))

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message. Drops it if the supervisor has stopped reading, so that messages do not accumulate."""
        if len(self._out) < 1 << 20:
            self._queue(message)

    def _queue(self, message: dict[str, Any]) -> None:
        if self._sock is not None:
            self._out += sockets.pack_message(message, self._sock.seals)
            self.flush()

    def flush(self) -> None:
        if self._sock is None or not self._out:
            return
        with contextlib.suppress(OSError):  # a broken connection is noticed when the socket is read
            sent = self._sock.send(self._out)
            del self._out[:sent]

    def have(self, digest: str, nbytes: int) -> None:
        """Reports to the supervisor, now and after each reconnection, that this sidecar can upload a blob."""
        if digest not in self._have:
            self._have[digest] = nbytes
            self._queue({"type": "have", "digest": digest, "nbytes": nbytes})

    def on_readable(self, now: float) -> bool:
        """Reads what has arrived. Returns True if the list of feeders changed."""
        assert self._sock is not None  # noqa: S101  polled only while there is a connection
        try:
            data = self._sock.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close(now)
            return False
        self._in.feed(data)
        changed = False
        try:
            while (message := self._in.take()) is not None:
                changed = self._message(message) or changed
        except (ProtocolError, KeyError, TypeError, ValueError) as exc:
            log(f"the connection to the supervisor was closed: {exc}")
            self.close(now)
        return changed

    def _message(self, message: dict[str, Any]) -> bool:
        if message["type"] == "feeders":
            self.feeders = [
                Endpoint(
                    str(f["name"]),
                    str(f["instance"]),
                    str(f["host"]),
                    int(f["port"]),
                    self._link(str(f.get("link", "")), str(f["instance"])),
                )
                for f in message["feeders"]
            ]
            self.desired = message.get("desired")
            self.notes = [str(n) for n in message.get("notes", [])]
            self.out_of_memory = [str(n) for n in message.get("out_of_memory", [])]
            self.known = True
            return True
        if message["type"] == "want":
            self._upload(str(message["digest"]))
        return False

    def _link(self, wrapped: str, instance: str) -> str:
        """Returns the key for connections to a feeder, as hexadecimal text."""
        return keys.unwrap(self._key, wrapped, instance).hex() if wrapped else ""

    def _upload(self, digest: str) -> None:
        """Uploads a blob from a child process, over the child's own connection, so that this process can continue."""
        nbytes = self._have.get(digest)
        if nbytes is None or not self._store.has(digest, nbytes):
            return
        parent = os.getpid()
        if os.fork() != 0:
            return
        code = 1
        try:
            die_with_parent(parent)
            default_signals()
            close_all_but(set())
            about = {"name": self._name, "job": self._job}
            upload(self.address, self._key, self._store, digest, nbytes, **about, tls=self._tls)
            code = 0
        except Exception as exc:
            log(f"{digest[:8]}, {nbytes} bytes, was not uploaded: {exc!r}")
        finally:
            os._exit(code)


def upload(
    address: tuple[str, int], key: bytes, store: BlobStore, digest: str, nbytes: int, *, name: str, job: str,
    tls: Credentials | None = None,
) -> None:  # fmt: skip
    """Sends a blob to the supervisor, and waits until it has arrived. Raises OSError, ProtocolError."""
    with handshake.connect(
        address,
        key,
        role="upload",
        name=name,
        job=job,
        versions=handshake.BY_ROLE,
        timeout_s=UPLOAD_TIMEOUT_S,
        tls=tls,
    ) as sock:
        sock.settimeout(UPLOAD_TIMEOUT_S)
        store.send(sock, digest, nbytes)
        sock.shutdown(socket.SHUT_WR)
        sock.recv(1)


class Failures:
    """The last failure of each rank, even if the failure ended the rank's trainer."""

    def __init__(self) -> None:
        self._by_rank: dict[str, tuple[int, dict[str, str]]] = {}

    def current(self) -> list[dict[str, str]]:
        """Returns the failures that have not been cleared."""
        return [failure for _, failure in self._by_rank.values()]

    def add(self, rank: str, pid: int, message: Mapping[str, Any]) -> None:
        """Handles a receiver's message: a failure or, if it has no text, the report that the last failure has passed.
        `pid`: the receiver's pid."""
        self._by_rank.pop(rank, None)
        if "text" in message:
            self._by_rank[rank] = pid, {"rank": rank, **{name: str(message[name]) for name in FIELDS}}

    def update(self, rank: str, pid: int, taken: int) -> None:
        """Records that the trainer of the receiver `pid` has taken `taken` batches. The first batch clears an earlier
        trainer's failure."""
        if taken and rank in self._by_rank and self._by_rank[rank][0] != pid:
            del self._by_rank[rank]


class BundleGc:
    """A garbage collector of bundles. It keeps the bundles of live streams, and each loader's last bundle for the next
    epoch."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._live: dict[tuple[int, bytes], Bundle] = {}
        """(receiver's pid, `Bundle.id`) -> bundle."""
        self._last: dict[tuple[int, int], Bundle] = {}
        """(receiver's pid, number of the loader) -> bundle."""
        # Trainers of an earlier sidecar may use these blobs: they get time to attach again.
        self._touch(path.name for path in store.folder.iterdir())

    def use(self, receiver: int, bundle: Bundle) -> None:
        """Records that a stream with `bundle` was opened."""
        self._live[receiver, bundle.id] = bundle
        before = self._last.pop((receiver, bundle.loader), None)
        self._last[receiver, bundle.loader] = bundle  # the newest comes last
        for key in [key for key in self._last if key[0] == receiver][:-MAX_LOADERS]:
            self._let_go([self._last.pop(key)])
        if before is None or before.code != bundle.code:
            self.sweep()

    def sweep(self) -> None:
        """Removes blobs that nobody uses or has used recently."""
        self._store.sweep(self._kept(), KEEP_UNUSED_S)

    def released(self, receiver: int, bundle_id: bytes) -> None:
        """Records that the last stream with that bundle was closed."""
        bundle = self._live.pop((receiver, bundle_id), None)
        self._let_go([] if bundle is None else [bundle])

    def gone(self, receiver: int) -> None:
        """Records that the receiver has exited. Its trainer has exited, too, or will attach again."""
        self._let_go([self._live.pop(key) for key in list(self._live) if key[0] == receiver])
        self._let_go([self._last.pop(key) for key in list(self._last) if key[0] == receiver])

    def _kept(self) -> set[str]:
        bundles = (*self._live.values(), *self._last.values())
        return {digest for bundle in bundles for digest, _ in bundle.blobs}

    def _let_go(self, bundles: Iterable[Bundle]) -> None:
        self._touch(digest for bundle in bundles for digest, _ in bundle.blobs)

    def _touch(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.utime(self._store.folder / name)
