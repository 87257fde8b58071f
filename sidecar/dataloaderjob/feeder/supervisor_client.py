"""Brings blobs that this node lacks from the supervisor into the node's folder."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from dataloaderjob.core import sockets
from dataloaderjob.core.blobs import BlobStore, chunks
from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.settings import FeederSettings

CONNECT_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
"""No byte of a blob for so long: the connection is given up and the blob asked for again."""


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
