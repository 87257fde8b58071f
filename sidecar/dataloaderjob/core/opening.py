"""The exchange before TLS: the accepting side sends a challenge, and the connecting side proves that it holds a key.

Beginning TLS costs the accepting side 0.6 ms of CPU time. It costs a stranger who replays one recorded message almost
nothing. Checking a proof takes only 20 µs. So a port under TLS (`core.acceptor`) begins TLS at once with peers that
send a proof. It spends only a small share of its time on others. Peers of a release without proofs are among these, and
get in unless strangers flood the port.

A proof is not a login: the certificates and the handshake under TLS still decide.

    s -> c   {"tls": 1, "error": ..., "challenge": random}       not encrypted, and nothing about the job
    c -> s   a proof, if there is a challenge: _HEAD, then JSON; then TLS
"""

from __future__ import annotations

import hmac
import json
import os
import struct
from collections.abc import Callable

from dataloaderjob.core.errors import AuthError, RemoteProtocolError
from dataloaderjob.core.keys import Key, key_for
from dataloaderjob.core.sockets import parse_message
from dataloaderjob.core.tls import CHALLENGE, NEEDS_TLS, preamble

Prove = Callable[[str], bytes]
"""Returns the proof that answers a challenge."""
_MAGIC = b"proof 1\n"
FIRST = _MAGIC[:1]
"""First byte of a proof. No TLS record begins with it."""
_HEAD = struct.Struct("<8sH")
"""Mark, and length of the JSON that follows: {"role", "name", "protocol", "mac"}."""
MAX_PROOF_NBYTES = 1024


def new_challenge() -> tuple[str, bytes]:
    """Returns a challenge, and the first message of a port under TLS, which contains it."""
    challenge = os.urandom(16).hex()
    return challenge, preamble({CHALLENGE: challenge})


def prover(key: Key, *, role: str, name: str, protocol: int) -> Prove:
    """Returns the function that proves that this process holds the key of a role."""

    def prove(challenge: str) -> bytes:
        stated = challenge, role, name, protocol
        found = {"role": role, "name": name, "protocol": protocol, "mac": _mac(key, *stated)}
        data = json.dumps(found, separators=(",", ":")).encode()
        return b"" if len(data) > MAX_PROOF_NBYTES else _HEAD.pack(_MAGIC, len(data)) + data

    return prove


def wanted(data: bytes) -> int:
    """Returns the number of bytes that a proof still lacks. Raises AuthError if `data` does not begin one."""
    if not _MAGIC.startswith(data[: len(_MAGIC)]):
        raise AuthError(NEEDS_TLS)
    if len(data) < _HEAD.size:
        return _HEAD.size - len(data)
    _, nbytes = _HEAD.unpack_from(data)
    if nbytes > MAX_PROOF_NBYTES:
        raise AuthError(f"a proof may have at most {MAX_PROOF_NBYTES} bytes, but the peer announces {nbytes}")
    return int(_HEAD.size + nbytes - len(data))


def is_proof(data: bytes, challenge: str, key: Key, newest: int) -> bool:
    """Returns True if `data` answers the challenge with a proof that the peer holds a role's key. `newest` is the
    newest version that this process speaks."""
    try:
        found = parse_message(data[_HEAD.size :])
        role, name, protocol, mac = (found.get(field) for field in ("role", "name", "protocol", "mac"))
        if type(protocol) is not int or not 0 < protocol <= newest:
            return False
        expected = _mac(key, challenge, str(role), str(name), protocol)
    except (AuthError, RemoteProtocolError):  # no such role, or no JSON
        return False
    return hmac.compare_digest(expected.encode(), str(mac).encode("utf-8", "replace"))


def _mac(key: Key, challenge: str, role: str, name: str, protocol: int) -> str:
    text = json.dumps(["opening", challenge, role, name, protocol])
    return hmac.digest(key_for(key, role, protocol, name), text.encode(), "sha256").hex()
