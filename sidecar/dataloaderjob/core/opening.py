"""What precedes TLS: a challenge from the side that accepted, and a proof of the key from the side that connected.

Beginning TLS takes the side that accepted 0.6 ms of CPU time, and a stranger who replays one recorded message takes
next to none. A proof takes 20 µs to check. A port under TLS (`core.acceptor`) therefore begins TLS at once with peers
that send a proof, and with others in a small share of its time. A proof is not a login: the certificates and the
handshake under TLS still decide. Peers of a release without proofs send none, and get in unless strangers flood the
port.

    s -> c   {"tls": 1, "error": ..., "challenge": random}       not encrypted, and nothing about the job
    c -> s   a proof (PROOF), if there is a challenge, then TLS
"""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable

from dataloaderjob.core.errors import AuthError
from dataloaderjob.core.keys import KeyOf
from dataloaderjob.core.tls import CHALLENGE, preamble

Prove = Callable[[str], bytes]
"""Returns the proof that answers a challenge."""
_MAGIC = b"proof 1\n"
"""No record of TLS begins with its first byte."""
FIRST = _MAGIC[:1]
_PROOF = struct.Struct("<8s16s32s")
"""Mark, role, and HMAC-SHA256 over challenge and role under the role's key."""
PROOF_NBYTES = _PROOF.size


def new_challenge() -> tuple[str, bytes]:
    """Returns a challenge, and the first message of a port under TLS, which contains it."""
    challenge = os.urandom(16).hex()
    return challenge, preamble({CHALLENGE: challenge})


def prover(key: bytes | KeyOf, role: str, protocol: int) -> Prove:
    """Returns the function that proves that this process holds the key of a role."""

    def prove(challenge: str) -> bytes:
        found = key if isinstance(key, bytes) else key(role, protocol)
        return _PROOF.pack(_MAGIC, role.encode(), _mac(found, challenge, role))

    return prove


def is_proof(data: bytes, challenge: str, key: bytes | KeyOf, protocol: int) -> bool:
    """Returns True if these PROOF_NBYTES bytes prove, for this challenge, that the peer holds a role's key."""
    magic, name, mac = _PROOF.unpack(data)
    role = name.rstrip(b"\0").decode("ascii", "replace")
    try:
        found = key if isinstance(key, bytes) else key(role, protocol)
    except AuthError:  # no such role
        return False
    return magic == _MAGIC and hmac.compare_digest(mac, _mac(found, challenge, role))


def _mac(key: bytes, challenge: str, role: str) -> bytes:
    return hmac.digest(key, f"opening {challenge} {role}".encode(), "sha256")
