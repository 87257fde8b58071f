"""The relay that moves blobs from a trainer's node to the feeders' nodes.

The relay requests a blob from a sidecar only if a feeder lacks the blob. If the feeders and the trainer share a folder,
no blob passes through this process. Each feeder that has a blob serves it to MAX_SERVED other feeders at a time, so 64
nodes have the blob after four turns. The relay decides from which source each feeder gets the blob. The server calls
the relay in the threads of connections.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dataloaderjob.core import sockets
from dataloaderjob.core.blobs import NODE_KEEP_S, SLOWEST, BlobStore, chunks
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.supervision import MAX_FEEDERS

ASK_AGAIN_S = 10.0
"""Seconds without new bytes of a requested blob after which the relay requests the blob from another sidecar."""
WAIT_S = 60.0
"""Seconds without new bytes of a blob after which a waiting feeder receives the answer "gone". The feeder asks again if
it still has tickets for the blob."""
IDLE_TIMEOUT_S = 60.0
MAX_SERVED = 2
"""Number of feeders that a source serves at a time. On equally fast nodes, one would be best. With two, a slow feeder
occupies only half of its source."""
MAX_FAILED = 2
"""Number of failed sources after which a feeder gets a blob from the head."""
MAX_SOURCES = 2 * MAX_FEEDERS
"""Maximum number of sources of a blob. A limit is needed because a feeder may claim any address."""
PLACE_WAIT_S = 10.0
Want = Callable[[str], None]
"""A function that sends {"type": "want"} to one sidecar. Raises OSError."""
Address = tuple[str, int]
HERE = None
"""The source that stands for this process."""
Source = Address | None
Sources = dict[Source, int]
"""source of a blob -> number of feeders that the source serves now."""


@dataclass(slots=True)
class _Upload:
    """A blob being uploaded by a sidecar."""

    holder: int
    asked_at: float
    """The time at which the blob was requested, or at which a part of the blob last arrived."""
    moved_at: float
    """The time at which a part of the blob last arrived, in this upload or an earlier one."""


class BlobRelay:
    """The relay of one job. It knows the sources of each blob, and the feeders that wait for a blob."""

    def __init__(self, folder: Path) -> None:
        self._store = BlobStore(folder)
        self._changed = threading.Condition()
        self._holders: dict[str, dict[int, Want]] = {}
        self._uploads: dict[str, _Upload] = {}
        """Blobs that were requested and have not arrived yet. All feeders that lack a blob wait for the same upload."""
        self._sources: dict[str, Sources] = {}
        """Sources of each blob. If a blob is removed from this process's folder, its sources are kept until the next
        upload."""

    def has(self, holder: int, digest: str, want: Want) -> None:
        """Records that a sidecar can upload this blob."""
        self._store.path(digest)  # rejects an invalid digest
        with self._changed:
            self._holders.setdefault(digest, {})[holder] = want
            self._changed.notify_all()

    def gone(self, holder: int) -> None:
        """Records that a sidecar's connection ended."""
        with self._changed:
            for digest in list(self._holders):
                self._holders[digest].pop(holder, None)
                if not self._holders[digest]:
                    del self._holders[digest]

    def receive(self, sock: socket.socket, digest: str, nbytes: int) -> None:
        """Receives an upload. Raises OSError. Raises RemoteProtocolError if the upload is not the announced blob, or
        was not requested."""
        if self._store.has(digest, nbytes):
            for _ in chunks(sock, nbytes):
                pass
        elif digest not in self._uploads:
            raise RemoteProtocolError(f"blob {digest[:8]} was uploaded, but nobody requested it")
        else:
            self._store.sweep(set(), NODE_KEEP_S)
            self._store.write(digest, self._moving(digest, chunks(sock, nbytes)))
        with self._changed:
            self._sources = {d: s for d, s in self._sources.items() if self._store.path(d).exists()}
            self._uploads.pop(digest, None)
            self._changed.notify_all()

    def serve(self, sock: socket.socket, digest: str, nbytes: int, address: Address | None) -> None:
        """Sends a blob to a feeder, or names another feeder that has it. If this process lacks the blob, requests it
        from a sidecar first. If no sidecar uploads it in time, answers "gone". `address`: the address at which the
        feeder will serve the blob to others; None if it will not. Raises OSError, RemoteProtocolError."""
        if not self._wait(digest, nbytes):
            sockets.send_message(sock, {"type": "gone"})
            return
        if address is None:
            self._store.send(sock, digest, nbytes)
            return
        with self._changed:
            sources = self._sources.setdefault(digest, {HERE: 0})
            sources.pop(address, None)  # the feeder had the blob earlier and no longer has it
        failed = 0
        while not self._served(
            sock, digest, nbytes, self._take_place(sources, here=failed >= MAX_FAILED), sources
        ):
            failed += 1
        with self._changed:
            if len(sources) < MAX_SOURCES:
                sources.setdefault(address, 0)
            self._changed.notify_all()

    def left(self, address: Address) -> None:
        """Records that a feeder is gone and no longer serves blobs."""
        with self._changed:
            for sources in self._sources.values():
                sources.pop(address, None)

    def _served(
        self, sock: socket.socket, digest: str, nbytes: int, source: Source, sources: Sources
    ) -> bool:
        """Sends the blob or names its source, and waits for the feeder's answer. Returns False if the feeder could not
        get the blob from this source."""
        stored = False
        try:
            if source is HERE:
                sock.settimeout(IDLE_TIMEOUT_S)
                self._store.send(sock, digest, nbytes)
            else:
                sock.settimeout(IDLE_TIMEOUT_S + nbytes / SLOWEST)
                sockets.send_message(sock, {"type": "peer", "host": source[0], "port": source[1]})
            stored = sockets.recv_message(sock).get("type") == "stored"
        except ConnectionError:  # the feeder that asked is gone, which is not the source's fault
            stored = True
            raise
        finally:
            with self._changed:
                if source in sources:
                    sources[source] = max(0, sources[source] - 1)
                if not stored and source is not HERE:
                    sources.pop(source, None)
                self._changed.notify_all()
        return stored

    def _take_place(self, sources: Sources, *, here: bool) -> Source:
        """Waits until the least busy source has a free place, and takes the place. Among equally busy sources, the head
        comes last, because all feeders need its link. After PLACE_WAIT_S, takes a place at the head even if the head is
        busy, because the other sources may be slow."""
        until = time.monotonic() + PLACE_WAIT_S
        with self._changed:
            while True:
                least = HERE if here else min(sources, key=lambda source: (sources[source], source is HERE))
                if sources[least] < MAX_SERVED:
                    break
                if time.monotonic() >= until:
                    least = HERE
                    break
                self._changed.wait(1.0)
            sources[least] += 1
            return least

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
        """Returns the function that requests a blob from a sidecar. Returns None if no sidecar has the blob. Also
        returns None while a sidecar uploads it, or if one was asked less than ASK_AGAIN_S ago."""
        upload, holders = self._uploads.get(digest), self._holders.get(digest, {})
        if upload is not None and upload.holder in holders and now - upload.asked_at < ASK_AGAIN_S:
            return None
        found = next(iter(holders), None)
        if found is None:
            return None
        want = holders[found] = holders.pop(found)  # the sidecar that is asked goes to the end of the queue
        self._uploads[digest] = _Upload(found, now, 0.0 if upload is None else upload.moved_at)
        return want

    def _moving(self, digest: str, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yields a blob's pieces, and records when each one arrives."""
        for piece in pieces:
            if (upload := self._uploads.get(digest)) is not None:
                upload.asked_at = upload.moved_at = time.monotonic()
            yield piece
