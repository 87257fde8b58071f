"""A feeder's connections to its supervisor: one says where it serves, one for each blob that this node lacks."""

from __future__ import annotations

import logging
import math
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable

from dataloaderjob.core import sockets
from dataloaderjob.core.blobs import BlobStore, chunks
from dataloaderjob.core.errors import ProtocolError, ServiceError
from dataloaderjob.core.processes import Backoff
from dataloaderjob.core.settings import FeederSettings, read_key

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
"""No byte of a blob for so long: the connection is given up and the blob asked for again."""
BACKOFF = Backoff(0.1, 2.0)
TELL_AFTER_S = 3.0
DRAIN_POLL_S = 0.05
_jitter = random.Random()  # noqa: S311  jitter
"""Never the module's own generator: user code in the build thread is seeded through that one."""


def connect(settings: FeederSettings, key: bytes, role: str) -> socket.socket:
    """A connection to the supervisor after the handshake. Raises OSError, ProtocolError."""
    if settings.supervisor_host is None:
        raise ServiceError(f"{settings.name} has no supervisor to ask")
    address = (settings.supervisor_host, settings.supervisor_port)
    sock = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    try:
        sockets.greet(sock, key, role=role, name=settings.name, job=settings.job)
        sockets.tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def fetch(
    settings: FeederSettings,
    key: bytes,
    store: BlobStore,
    digest: str,
    nbytes: int,
    *,
    wanted: Callable[[], bool],
) -> bool:
    """Has one blob in the node's folder, once for all feeders there.

    Returns False when nobody wants it any more, or nobody has it yet. Raises OSError, ProtocolError.
    """
    with store.lock(digest):
        if store.has(digest, nbytes):
            return True
        with connect(settings, key, "blob") as sock:
            sockets.send_message(sock, {"type": "get", "digest": digest, "nbytes": nbytes})
            while not select.select([sock], [], [], 1.0)[0]:
                if not wanted():
                    return False
            sock.settimeout(STALL_TIMEOUT_S)
            if sockets.recv_message(sock)["type"] != "blob":
                return False
            store.write(digest, chunks(sock, nbytes))
    return True


class Registration:
    """Runs in a thread of its own until the process ends.

    `idle` tells whether the server has nothing left to do, as a feeder that is drained has to wait for.
    """

    def __init__(
        self, settings: FeederSettings, *, host: str, port: int, instance: str, idle: Callable[[], bool]
    ) -> None:
        self._settings, self._idle = settings, idle
        self._key = read_key(settings.key_path)
        self._ready = {
            "type": "ready",
            "host": host,
            "port": port,
            "instance": instance,
            "pid": os.getpid(),
            "node": settings.node,
            "session": settings.session,
        }

    def start(self) -> None:
        threading.Thread(target=self._forever, name="dlj-registration", daemon=True).start()

    def _forever(self) -> None:
        failures = 0
        logged, lost = "", -math.inf
        while True:
            since = time.monotonic()
            try:
                with connect(self._settings, self._key, "feeder") as sock:
                    sockets.send_message(sock, self._ready)
                    logged, lost = "", math.inf
                    self._listen(sock)
            except (OSError, ProtocolError) as exc:
                lost = min(lost, time.monotonic())
                # At the end of a run the supervisor goes first.
                if str(exc) != logged and time.monotonic() - lost >= TELL_AFTER_S:
                    logged = str(exc)
                    log.warning("%s has no supervisor, trying again: %s", self._settings.name, exc)
            was_up = time.monotonic() - since > BACKOFF.last_s  # it was a connection for a while
            failures = 1 if was_up else failures + 1
            time.sleep(BACKOFF.wait_s(failures) * _jitter.uniform(0.5, 1.0))

    def _listen(self, sock: socket.socket) -> None:
        """Listens until the connection ends, which raises ConnectionError."""
        while True:
            if sockets.recv_message(sock).get("type") == "drain":
                while not self._idle():
                    time.sleep(DRAIN_POLL_S)
                sockets.send_message(sock, {"type": "drained"})
