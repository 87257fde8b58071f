"""Mutual challenge with the job's key, and the small JSON messages that carry it. Pure.

Every TCP connection of a job begins so (c = the side that connected):

    s -> c   {"nonce": s, "protocol": n}
    c -> s   {"nonce": c, "protocol": n, "role": ..., "name": ..., "job": ..., "facts": {...}, "mac": ...}
    s -> c   {"mac": ..., "facts": {...}}       or  {"error": "..."} and the end

Each mac is HMAC-SHA256 over a label for its direction, both nonces and the fields that it vouches for,
so neither side can be replayed or reflected. It stops peers without the key; it does not stop somebody
who sits on the path (TLS does). `ClientHandshake` and `ServerHandshake` take bytes and return bytes: whoever has
a socket, of any kind, moves them.
"""

from __future__ import annotations

import hmac
import json
import os
import struct
from typing import Any

from dataloaderjob.core.errors import AuthError, RemoteProtocolError
from dataloaderjob.core.frames import PROTOCOL

LENGTH = struct.Struct("<I")
MAX_HELLO_NBYTES = 4096
"""What an unauthenticated peer may make us hold."""
HANDSHAKE_TIMEOUT_S = 5.0
KEY_NBYTES = 32


def new_key() -> bytes:
    return os.urandom(KEY_NBYTES)


def pack_message(message: dict[str, Any]) -> bytes:
    """u32 length, then JSON."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(data)) + data


def parse_message(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    try:
        message = json.loads(bytes(data))
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError("a message is not JSON") from exc
    if not isinstance(message, dict):
        raise RemoteProtocolError("a message is not a JSON object")
    return message


def take_message(data: bytearray, limit: int) -> dict[str, Any] | None:
    """Takes the first message off what has come; None until it is whole. Raises RemoteProtocolError."""
    if len(data) < LENGTH.size:
        return None
    end = LENGTH.size + _length(data, limit)
    if len(data) < end:
        return None
    message = parse_message(data[LENGTH.size : end])
    del data[:end]
    return message


def _length(data: bytes | bytearray, limit: int) -> int:
    """Bytes of the message whose length is at the start of `data`."""
    (n,) = LENGTH.unpack_from(data)
    if n > limit:
        raise RemoteProtocolError(f"a message of {n} bytes exceeds {limit}")
    return int(n)


def _mac(key: bytes, label: str, *fields: object) -> str:
    text = json.dumps([label, *fields], separators=(",", ":"), sort_keys=True)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _same(expected: str, found: object) -> bool:
    """Compares in constant time; a peer may tell anything, also what is no ASCII."""
    return hmac.compare_digest(expected.encode(), str(found).encode("utf-8", "replace"))


def challenge() -> dict[str, Any]:
    """First message, of the side that accepted."""
    return {"nonce": os.urandom(16).hex(), "protocol": PROTOCOL}


def answer(
    key: bytes, challenge: dict[str, Any], *, role: str, name: str, job: str, facts: dict[str, Any]
) -> dict[str, Any]:
    """Second message, of the side that connected. Raises AuthError on another protocol version."""
    _check_protocol(challenge)
    nonce = os.urandom(16).hex()
    fields = (challenge.get("nonce"), nonce, role, name, job, facts)
    return {
        "nonce": nonce, "protocol": PROTOCOL, "role": role, "name": name, "job": job, "facts": facts,
        "mac": _mac(key, "connector", *fields),
    }  # fmt: skip


def accept(
    key: bytes, challenge: dict[str, Any], reply: dict[str, Any], *, job: str, facts: dict[str, Any]
) -> dict[str, Any]:
    """Third message: checks the answer and vouches for us. Raises AuthError with the reason."""
    _check_protocol(reply)
    fields = (challenge["nonce"], *(reply.get(k) for k in ("nonce", "role", "name", "job", "facts")))
    if not _same(_mac(key, "connector", *fields), reply.get("mac")):
        raise AuthError("the peer does not hold this job's key")
    if reply["job"] != job:
        raise AuthError(f"this is job {job!r}, the peer belongs to job {reply['job']!r}")
    return {"mac": _mac(key, "acceptor", challenge["nonce"], reply["nonce"], facts), "facts": facts}


def confirm(
    key: bytes, challenge: dict[str, Any], reply: dict[str, Any], last: dict[str, Any]
) -> dict[str, Any]:
    """Checks the third message; returns the acceptor's facts. Raises AuthError with the reason."""
    if "error" in last:
        raise AuthError(f"the peer refused: {last['error']}")
    facts = last.get("facts", {})
    expected = _mac(key, "acceptor", challenge.get("nonce"), reply["nonce"], facts)
    if not _same(expected, last.get("mac")):
        raise AuthError("the peer that answered does not hold this job's key")
    return dict(facts)


class Handshake:
    """Either side: send what `receive` returns, until `done`."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def done(self) -> bool:
        raise NotImplementedError

    def _on(self, message: dict[str, Any]) -> bytes:
        raise NotImplementedError

    @property
    def wanted(self) -> int:
        """Bytes that are missing of the message that comes in, for who must not read more."""
        have = len(self._data)
        if have < LENGTH.size:
            return LENGTH.size - have
        return LENGTH.size + _length(self._data, MAX_HELLO_NBYTES) - have

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Returns what is to be sent. Raises AuthError, RemoteProtocolError."""
        self._data += data
        answer = b""
        while not self.done and (message := take_message(self._data, MAX_HELLO_NBYTES)) is not None:
            answer += self._on(message)
        return answer

    @property
    def rest(self) -> bytes:
        """What came behind the handshake."""
        return bytes(self._data)


class ClientHandshake(Handshake):
    """The side that connected."""

    def __init__(
        self, key: bytes, *, role: str, name: str, job: str, facts: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self._key = key
        self._fields: dict[str, Any] = {"role": role, "name": name, "job": job, "facts": facts or {}}
        self._challenge: dict[str, Any] | None = None
        self._reply: dict[str, Any] = {}
        self.facts: dict[str, Any] | None = None
        """The peer's, once it is done."""

    @property
    def done(self) -> bool:
        return self.facts is not None

    def _on(self, message: dict[str, Any]) -> bytes:
        if self._challenge is not None:
            self.facts = confirm(self._key, self._challenge, self._reply, message)
            return b""
        self._challenge, self._reply = message, answer(self._key, message, **self._fields)
        return pack_message(self._reply)


class ServerHandshake(Handshake):
    """The side that accepted; it sends `greeting` first."""

    def __init__(self, key: bytes, *, job: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._key, self._job, self._facts = key, job, facts or {}
        self._challenge = challenge()
        self.greeting = pack_message(self._challenge)
        self.peer: dict[str, Any] | None = None
        """What the peer said of itself (role, name, facts), once it is done."""

    @property
    def done(self) -> bool:
        return self.peer is not None

    def _on(self, message: dict[str, Any]) -> bytes:
        last = accept(self._key, self._challenge, message, job=self._job, facts=self._facts)
        self.peer = message
        return pack_message(last)


def _check_protocol(message: dict[str, Any]) -> None:
    if message.get("protocol") != PROTOCOL:
        raise AuthError(
            f"protocol version {PROTOCOL} is needed, the peer speaks {message.get('protocol')}: "
            "install the same dataloaderjob version in the trainer, sidecar and feeder images"
        )
