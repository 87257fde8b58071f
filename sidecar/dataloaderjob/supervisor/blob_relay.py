"""Blobs that pass the supervisor on their way from a trainer's node to the feeders' nodes.

A blob is asked of a sidecar only when a feeder lacks it: where feeders and trainer share a folder, none
ever comes here. Used by the threads of the server's connections.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dataloaderjob.core import sockets
from dataloaderjob.core.blobs import NODE_KEEP_S, BlobStore, chunks

ASK_AGAIN_S = 10.0
"""A sidecar that was asked for a blob gets so long to begin; then another one is asked, too."""
WAIT_S = 60.0
"""A feeder that waits longer is told "gone" and asks again while it has tickets for that blob."""

Want = Callable[[str], None]
"""Sends {"type": "want"} to one sidecar. Raises OSError."""


class BlobRelay:
    """Who has which blob, and who waits for one."""

    def __init__(self, folder: Path) -> None:
        self._store = BlobStore(folder)
        self._changed = threading.Condition()
        self._holders: dict[str, dict[int, Want]] = {}

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
            self._store.write(digest, chunks(sock, nbytes))
        with self._changed:
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
        deadline = time.monotonic() + WAIT_S
        asked: dict[int, float] = {}
        while not self._store.has(digest, nbytes):
            now = time.monotonic()
            if now > deadline:
                return False
            with self._changed:
                holders = dict(self._holders.get(digest, {}))
            if not any(now - at < ASK_AGAIN_S for holder, at in asked.items() if holder in holders):
                for holder, want in sorted(holders.items(), key=lambda item: asked.get(item[0], 0.0)):
                    asked[holder] = now
                    with contextlib.suppress(OSError):
                        want(digest)
                        break
            with self._changed:
                if not self._store.has(digest, nbytes):
                    self._changed.wait(1.0)
        return True
