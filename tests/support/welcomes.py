"""The accepting side of the handshake over a blocking socket, for parts that a test plays."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from dataloaderjob.core.errors import AuthError
from dataloaderjob.core.handshake import CONTROL, HANDSHAKE_TIMEOUT_S, ServerHandshake, Versions
from dataloaderjob.core.keys import Key
from dataloaderjob.core.sockets import Connection, recv_exactly, send_message, transport_of


def welcome(
    sock: Connection, key: Key, *, job: str, facts: dict[str, Any] | None = None, versions: Versions = CONTROL
) -> dict[str, Any]:  # fmt: skip
    """Runs the accepting side. Returns the peer's answer (role, name, facts); sends refusals to the peer."""
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    about = facts if isinstance(facts, dict) else None
    handshake = ServerHandshake(key, job=job, facts=about, versions=versions, transport=transport_of(sock))
    if facts is not about:  # what only an impostor says
        handshake._facts = facts  # type: ignore[assignment]
    sock.sendall(handshake.greeting)
    while handshake.peer is None:
        data = recv_exactly(sock, handshake.wanted)
        try:
            sock.sendall(handshake.receive(data))
        except AuthError as exc:
            with contextlib.suppress(OSError):
                send_message(sock, {"error": str(exc)})
            raise
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:
        sock.seals = handshake.seals
    return handshake.peer
