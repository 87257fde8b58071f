"""Blobs on their way from a trainer's node to the feeders' nodes.

A blob is asked of a sidecar only when a feeder lacks it: where feeders and trainer share a folder, none ever comes
here. Who has got one hands it on, to MAX_SERVED others at a time: 64 nodes have it after 4 such turns, where the head
alone would send it 64 times. The relay says who gets it from whom. The server calls it in the threads of connections.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dataloaderjob.core import sockets
from dataloaderjob.core.blobs import NODE_KEEP_S, BlobStore, chunks

ASK_AGAIN_S = 10.0
"""A sidecar that was asked for a blob, and of which nothing comes for so long, is given up; another one is asked."""
WAIT_S = 60.0
"""A feeder that waits for so long, while no part of the blob comes, is told "gone" and asks again while it has tickets
for that blob."""

IDLE_TIMEOUT_S = 60.0
MAX_SERVED = 2
"""One would be the quickest in a network of equals; with two a slow one holds up half of a source only."""
Want = Callable[[str], None]
"""Sends {"type": "want"} to one sidecar. Raises OSError."""
Address = tuple[str, int]
HERE: Address = ("", 0)
"""Stands for this process among those that have a blob."""
Sources = dict[Address, int]
"""How many each of those that have a blob serves now."""


@dataclass(slots=True)
class _Upload:
    """A blob on its way from a sidecar."""

    holder: int
    asked_at: float
    """When it was asked for, or a part of it came last."""
    moved_at: float
    """When a part of it came last, of this upload or an earlier one."""


class BlobRelay:
    """Who has which blob, and who waits for one."""

    def __init__(self, folder: Path) -> None:
        self._store = BlobStore(folder)
        self._changed = threading.Condition()
        self._holders: dict[str, dict[int, Want]] = {}
        self._uploads: dict[str, _Upload] = {}
        """Blobs that were asked for and are not here: all feeders that miss one wait for the same upload."""
        self._sources: dict[str, Sources] = {}
        """Sources of each blob that is here."""

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
            self._sources = {d: s for d, s in self._sources.items() if self._store.path(d).exists()}
            self._uploads.pop(digest, None)
            self._changed.notify_all()

    def serve(self, sock: socket.socket, digest: str, nbytes: int, address: Address | None) -> None:
        """Sees to it that a feeder gets a blob, asking sidecars for it if it is not here. `address`: where that feeder
        hands it on; None for one that does not, and gets it from here. Raises OSError, RemoteProtocolError."""
        if not self._wait(digest, nbytes):
            sockets.send_message(sock, {"type": "gone"})
            return
        if address is None:
            self._store.send(sock, digest, nbytes)
            return
        with self._changed:
            sources = self._sources.setdefault(digest, {HERE: 0})
        while not self._served(sock, digest, nbytes, sources):
            pass
        with self._changed:
            sources.setdefault(address, 0)
            self._changed.notify_all()

    def _served(self, sock: socket.socket, digest: str, nbytes: int, sources: Sources) -> bool:
        """Names a source, and waits for what the feeder says of it: that it has the blob, or could not get it there."""
        source, answer = self._take_place(sources), {}
        try:
            if source == HERE:
                sock.settimeout(IDLE_TIMEOUT_S)
                self._store.send(sock, digest, nbytes)
            else:  # takes as long as it takes; keep-alives find a feeder that is gone
                sock.settimeout(None)
                sockets.send_message(sock, {"type": "peer", "host": source[0], "port": source[1]})
            answer = sockets.recv_message(sock)
        finally:
            with self._changed:
                if source in sources:
                    sources[source] -= 1
                if answer.get("type") == "get" and source != HERE:
                    sources.pop(source, None)
                self._changed.notify_all()
        return answer.get("type") == "stored"

    def _take_place(self, sources: Sources) -> Address:
        """The least busy source, waiting for one; of several the head comes last, whose link all need."""
        with self._changed:
            while True:
                least = min(sources, key=lambda source: (sources[source], source == HERE))
                if sources[least] < MAX_SERVED:
                    sources[least] += 1
                    return least
                self._changed.wait(1.0)

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
        found = next(iter(holders), None)
        if found is None:
            return None
        want = holders[found] = holders.pop(found)  # who was asked last is the last to be asked again
        self._uploads[digest] = _Upload(found, now, 0.0 if upload is None else upload.moved_at)
        return want

    def _moving(self, digest: str, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Notes that parts come."""
        for piece in pieces:
            if (upload := self._uploads.get(digest)) is not None:
                upload.asked_at = upload.moved_at = time.monotonic()
            yield piece
