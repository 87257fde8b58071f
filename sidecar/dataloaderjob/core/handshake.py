"""The handshake that begins every connection of a job.

Each side proves to the other that it holds the role's key (`core.keys`). c is the connecting side, and s is the
accepting side:

    s -> c   {"nonce": s, "protocol": newest, "oldest": oldest}      the versions that s speaks
    c -> s   {"nonce": c, "protocol": n, "role": ..., "name": ..., "job": ..., "facts": {...}, "mac": ...}
                                             the newest version that both speak, used from then on
    s -> c   {"mac": ..., "facts": {...}}       or  {"error": "..."}, then the connection ends

Each mac is HMAC-SHA256 over a label for its direction and everything that both sides have stated. Therefore, no message
can be replayed or reflected, and nobody on the path can change a version, a role or a name. The keys of the seals
(`core.seals`) are derived from the same statements. Seals protect all later messages of a TCP connection. Nothing is
encrypted.

`ClientHandshake` and `ServerHandshake` take and return bytes. The socket's owner sends and receives them.

Each side states its transport among its facts (`sockets.transport_of`), and refuses a peer that states another. Unix
sockets have no seals, so a relay through a Unix socket would otherwise strip the seals.

Before version SEALED of the control protocol, connections had no seals, and the macs did not cover versions. But they
covered the nonce s, which now ends with the newest version that s speaks. So nobody on the path can downgrade two newer
peers to such a version.
"""

from __future__ import annotations

import hmac
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataloaderjob.core.errors import AuthError, RemoteProtocolError
from dataloaderjob.core.frames import PROTOCOL
from dataloaderjob.core.keys import NAMED, SINCE, Key, Part, key_for
from dataloaderjob.core.opening import prover
from dataloaderjob.core.seals import Opener, Sealer, Seals
from dataloaderjob.core.sockets import (
    LENGTH,
    TCP,
    Connection,
    dial,
    length_of,
    pack_message,
    recv_exactly,
    take_message,
    transport_of,
    tune,
)
from dataloaderjob.core.texts import clean

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

MAX_HELLO_NBYTES = 4096
"""Maximum size of a handshake message, which limits the memory that an unauthenticated peer can occupy."""
HANDSHAKE_TIMEOUT_S = 5.0
KEY_NBYTES = 32
TLS_RECORDS = (b"\x16\x03\x01", b"\x16\x03\x03")
"""The first bytes that a peer sends under TLS. Our own messages begin with their length, whose third byte is 0."""
UNDER_TLS = (
    "the peer uses TLS, but this process does not: all of a job's pods must run a release that supports spec.loader.tls"
    "; update this pod's image, or start the job with spec.loader.tls: false"
)
MAX_ERROR = 400
MAX_TRANSPORT = 120
SEALED = 5
"""Version of the control protocol from which connections have seals."""
BOUND = 6
"""Version of the control protocol from which both sides state their transport."""
TRANSPORT = "transport"
"""Key of the fact in which a side states its transport."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of one protocol that a process speaks."""

    oldest: int
    newest: int
    remedy: str
    """The advice to the user if a peer speaks none of these versions."""
    sealed: int = SEALED
    """The version from which connections have seals."""
    bound: int = BOUND
    """The version from which both sides state their transport."""

    def common(self, challenge: dict[str, Any]) -> int:
        """Returns the newest version that both sides speak. Raises AuthError if there is none, or if the versions were
        altered in transit."""
        newest = challenge.get("protocol")
        oldest = challenge.get("oldest", newest)
        stated = str(challenge.get("nonce")).partition("-")[2]
        if stated and stated != str(newest):
            raise AuthError(
                f"the peer speaks protocol version {stated[:20]}, which was altered to {newest} in transit"
            )
        if type(newest) is not int or type(oldest) is not int or not oldest <= newest:
            raise self._refusal(newest)
        if oldest > self.newest or newest < self.oldest:
            raise self._refusal(newest if oldest == newest else f"{oldest} to {newest}")
        return min(newest, self.newest)

    def check(self, reply: dict[str, Any]) -> None:
        """Raises AuthError unless this process speaks the version that the peer chose."""
        chosen = reply.get("protocol")
        if type(chosen) is not int or not self.oldest <= chosen <= self.newest:
            raise self._refusal(chosen)

    def _refusal(self, theirs: object) -> AuthError:
        ours = str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        return AuthError(f"the peer must speak protocol version {ours}, but speaks {theirs}: {self.remedy}")


DATA = Versions(
    PROTOCOL, PROTOCOL, "install the same dataloaderjob version in the trainer, sidecar and feeder images",
    sealed=PROTOCOL, bound=PROTOCOL,
)  # fmt: skip
"""Versions of the data path. Frames have only one version, because all images of a job are of the same release."""
CONTROL = Versions(
    3,
    6,
    "use images of the operator's release or of the release before it",
)
"""Versions of the messages to and from the supervisor (`core.supervision`), which an operator of another release may
poll.

Bump `newest` for a message or a meaning that peers of this version do not know. Bump `oldest` later, so that each
release can talk to the previous one. A new key in a message requires neither, because peers ignore unknown keys.
"""
BY_ROLE = Versions(SINCE, CONTROL.newest, CONTROL.remedy)
"""Versions for processes that do not hold the job's key. Versions before SINCE need that key (`core.keys`)."""
BY_NAME = Versions(NAMED, CONTROL.newest, CONTROL.remedy)
"""Versions for a feeder that holds the key of its name."""


def new_key() -> bytes:
    return os.urandom(KEY_NBYTES)


def new_challenge(versions: Versions = CONTROL) -> dict[str, Any]:
    """Returns the first message, which the accepting side sends."""
    nonce = f"{os.urandom(16).hex()}-{versions.newest}"
    return {"nonce": nonce, "protocol": versions.newest, "oldest": versions.oldest}


def answer_challenge(
    key: Key, challenge: dict[str, Any], *, role: str, name: str, job: str, facts: dict[str, Any],
    versions: Versions = CONTROL,
) -> dict[str, Any]:  # fmt: skip
    """Returns the second message, which the connecting side sends. Raises AuthError if the sides have no common
    version."""
    chosen = versions.common(challenge)
    reply = {
        "nonce": os.urandom(16).hex(), "protocol": chosen, "role": role, "name": name, "job": job, "facts": facts,
    }  # fmt: skip
    stated = _stated(challenge, reply, versions)
    return {**reply, "mac": _mac(key_for(key, role, chosen, name), "connector", *stated).hex()}


def accept_answer(
    key: Key, challenge: dict[str, Any], reply: dict[str, Any], *, job: str, facts: dict[str, Any],
    versions: Versions = CONTROL,
) -> dict[str, Any]:  # fmt: skip
    """Checks the answer and returns the third message, which authenticates the acceptor. Raises AuthError with the
    reason."""
    versions.check(reply)
    key = key_for(key, str(reply.get("role")), reply["protocol"], str(reply.get("name")))
    if not _same(_mac(key, "connector", *_stated(challenge, reply, versions)), reply.get("mac")):
        raise AuthError(
            f"the peer does not hold this job's key for role {str(reply.get('role'))[:20]!r}, or its answer was "
            "altered in transit"
        )
    if reply["job"] != job:
        raise AuthError(f"this is job {job!r}, but the peer belongs to job {reply['job']!r}")
    vouched = _vouched(challenge, reply, facts, versions)
    return {"mac": _mac(key, "acceptor", *vouched).hex(), "facts": facts}


def confirm_acceptance(
    key: Key, challenge: dict[str, Any], reply: dict[str, Any], last: dict[str, Any], versions: Versions = CONTROL
) -> dict[str, Any]:  # fmt: skip
    """Checks the third message and returns the acceptor's facts. Raises AuthError with the reason."""
    if "error" in last:
        raise AuthError(f"the peer refused: {last['error']}")
    facts = last.get("facts", {})
    key = key_for(key, reply["role"], reply["protocol"], str(reply["name"]))
    if not _same(_mac(key, "acceptor", *_vouched(challenge, reply, facts, versions)), last.get("mac")):
        raise AuthError(
            "the peer that answered does not hold this job's key, or its message was altered in transit"
        )
    if not isinstance(facts, dict):
        raise RemoteProtocolError(f"a peer's facts must be a JSON object, but are {facts!r}")
    return facts


def seals_after(
    key: Key, challenge: dict[str, Any], reply: dict[str, Any], versions: Versions = CONTROL, *, accepted: bool
) -> Seals | None:  # fmt: skip
    """Returns the seals of the messages that follow the handshake, or None if the version has none. `accepted` is True
    on the accepting side."""
    if reply["protocol"] < versions.sealed:
        return None
    key, stated = (
        key_for(key, reply["role"], reply["protocol"], str(reply["name"])),
        _stated(challenge, reply, versions),
    )
    to_acceptor, to_connector = (
        _mac(key, f"seals of the {side}", *stated) for side in ("connector", "acceptor")
    )
    out, into = (to_connector, to_acceptor) if accepted else (to_acceptor, to_connector)
    return Seals(Sealer(out), Opener(into))


def check_transport(ours: str, facts: dict[str, Any], protocol: int, versions: Versions) -> None:
    """Raises AuthError unless the peer's facts state the same transport as ours. Peers of earlier versions state
    none."""
    theirs = facts.get(TRANSPORT)
    if theirs == ours or (theirs is None and protocol < versions.bound):
        return
    raise AuthError(
        f"both sides must use the same transport, but this side uses {ours} and the peer uses "
        f"{clean(theirs, MAX_TRANSPORT)}: something relays the connection; connect the two directly"
    )


def without_transport(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != TRANSPORT}


def _stated(challenge: dict[str, Any], reply: dict[str, Any], versions: Versions) -> tuple[object, ...]:
    """Returns the fields of the first two messages that their version's macs cover."""
    stated = (challenge.get("nonce"), *(reply.get(k) for k in ("nonce", "role", "name", "job", "facts")))
    if reply["protocol"] < versions.sealed:
        return stated
    return *stated, challenge.get("protocol"), challenge.get("oldest"), reply["protocol"]


def _vouched(
    challenge: dict[str, Any], reply: dict[str, Any], facts: object, versions: Versions
) -> tuple[object, ...]:  # fmt: skip
    """Returns the fields that the acceptor's mac covers."""
    if reply["protocol"] < versions.sealed:
        return challenge.get("nonce"), reply["nonce"], facts
    return *_stated(challenge, reply, versions), facts


def _mac(key: bytes, label: str, *fields: object) -> bytes:
    text = json.dumps([label, *fields], separators=(",", ":"), sort_keys=True)
    return hmac.digest(key, text.encode(), "sha256")


def _same(expected: bytes, found: object) -> bool:
    """Compares a mac with a peer's in constant time. The peer may have sent anything, including non-ASCII text."""
    return hmac.compare_digest(expected.hex().encode(), str(found).encode("utf-8", "replace"))


class Handshake:
    """One side of the handshake. Until `done`, its owner sends the bytes that `receive` returns."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.done = False
        self.seals: Seals | None = None
        """The seals of later messages, once the handshake is done. None if the version has no seals."""

    def _on(self, message: dict[str, Any]) -> bytes:
        raise NotImplementedError

    @property
    def wanted(self) -> int:
        """Number of bytes still missing from the incoming message, for callers that must not read past its end."""
        have = len(self._data)
        if have < LENGTH.size:
            return LENGTH.size - have
        return LENGTH.size + length_of(self._data, MAX_HELLO_NBYTES) - have

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Takes bytes from the peer. Returns the bytes to send. Raises AuthError and RemoteProtocolError."""
        self._data += data
        if self._data.startswith(TLS_RECORDS):
            raise AuthError(UNDER_TLS)
        answer = b""
        while not self.done and (message := take_message(self._data, MAX_HELLO_NBYTES)) is not None:
            try:
                answer += self._on(message)
            except (
                RecursionError
            ) as exc:  # JSON that can be parsed, but is too deep to be encoded again for its MAC
                raise RemoteProtocolError("a message of the handshake is nested too deeply") from exc
        return answer

    @property
    def rest(self) -> bytes:
        """Bytes that arrived after the handshake."""
        return bytes(self._data)


class ClientHandshake(Handshake):
    """The connecting side of the handshake."""

    def __init__(
        self, key: Key, *, role: str, name: str, job: str, facts: dict[str, Any] | None = None,
        versions: Versions = CONTROL, transport: str = TCP,
    ) -> None:  # fmt: skip
        """`transport` is the result of `sockets.transport_of` for the connection."""
        super().__init__()
        self._key = key
        self._versions, self._transport = versions, transport
        stated = {**(facts or {}), TRANSPORT: transport}
        self._fields: dict[str, Any] = {"role": role, "name": name, "job": job, "facts": stated}
        self._challenge: dict[str, Any] | None = None
        self._reply: dict[str, Any] = {}
        self.facts: dict[str, Any] | None = None
        """The peer's facts, once the handshake is done."""

    def _on(self, message: dict[str, Any]) -> bytes:
        if self._challenge is not None:
            about = self._key, self._challenge, self._reply
            facts = confirm_acceptance(*about, message, self._versions)
            check_transport(self._transport, facts, self._reply["protocol"], self._versions)
            self.done, self.facts = True, without_transport(facts)
            self.seals = seals_after(*about, self._versions, accepted=False)
            return b""
        if "error" in message:  # from a port that sends no greeting, such as one under TLS
            raise AuthError(f"the peer refused: {clean(message['error'], MAX_ERROR)}")
        self._challenge, self._reply = (
            message,
            answer_challenge(self._key, message, **self._fields, versions=self._versions),
        )
        return pack_message(self._reply)


class ServerHandshake(Handshake):
    """The accepting side of the handshake. Its owner sends `greeting` first."""

    def __init__(
        self, key: Key, *, job: str, facts: dict[str, Any] | None = None, versions: Versions = CONTROL,
        transport: str = TCP,
    ) -> None:  # fmt: skip
        """`transport` is the result of `sockets.transport_of` for the connection."""
        super().__init__()
        self._key, self._job, self._versions, self._transport = key, job, versions, transport
        self._facts = {**(facts or {}), TRANSPORT: transport}
        self._challenge = new_challenge(versions)
        self.greeting = pack_message(self._challenge)
        self.peer: dict[str, Any] | None = None
        """The peer's answer (role, name, facts, and the protocol version it chose), once the handshake is done."""

    def _on(self, message: dict[str, Any]) -> bytes:
        last = accept_answer(
            self._key, self._challenge, message, job=self._job, facts=self._facts, versions=self._versions
        )
        facts = message["facts"] if isinstance(message.get("facts"), dict) else {}
        check_transport(self._transport, facts, message["protocol"], self._versions)
        self.done, self.peer = True, {**message, "facts": without_transport(facts)}
        self.seals = seals_after(self._key, self._challenge, message, self._versions, accepted=True)
        return pack_message(last)


def connect(
    address: tuple[str, int], key: Key, *, role: str, name: str, job: str, versions: Versions = CONTROL,
    timeout_s: float = HANDSHAKE_TIMEOUT_S, tls: Credentials | None = None, to: Part = Part.SUPERVISOR,
) -> Connection:  # fmt: skip
    """Connects and completes the handshake. Returns a connection without a timeout. Raises OSError and ProtocolError.

    `tls` contains the certificates of this process. It is None if the job does not use TLS. `to` is the part of the job
    that listens at `address`.
    """
    sock = dial(address, timeout_s)
    try:
        if tls is not None:
            sock = tls.connected(sock, to, prover(key, role=role, name=name, protocol=versions.newest))
        greet(sock, key, role=role, name=name, job=job, versions=versions, timeout_s=timeout_s)
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def greet(
    sock: Connection,
    key: Key,
    *,
    role: str,
    name: str,
    job: str,
    facts: dict[str, Any] | None = None,
    versions: Versions = CONTROL,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> dict[str, Any]:
    """Runs the connecting side of the handshake. Returns the peer's facts. Afterwards the socket has no timeout, and
    its messages carry seals."""
    sock.settimeout(timeout_s)
    handshake = ClientHandshake(
        key, role=role, name=name, job=job, facts=facts, versions=versions, transport=transport_of(sock)
    )
    while handshake.facts is None:
        if reply := handshake.receive(
            recv_exactly(sock, handshake.wanted)
        ):  # sending nothing raises if the peer is gone
            sock.sendall(reply)
    sock.settimeout(None)
    sock.end_handshake(handshake.seals)
    return handshake.facts
