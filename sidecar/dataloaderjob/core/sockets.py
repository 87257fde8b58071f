"""JSON messages for connections outside the data path, and the handshake that begins every connection of a job.

Each side proves to the other that it holds the job's key (c = the side that connected):

    s -> c   {"nonce": s, "protocol": newest, "oldest": oldest}      the versions that s speaks
    c -> s   {"nonce": c, "protocol": n, "role": ..., "name": ..., "job": ..., "facts": {...}, "mac": ...}
                                             the newest version that both speak, used from then on
    s -> c   {"mac": ..., "facts": {...}}       or  {"error": "..."} and the end

Each mac is HMAC-SHA256 over a label for its direction, both nonces and the fields that it vouches for, so neither side
can be replayed or reflected. It stops peers without the key; it does not stop an attacker on the path (TLS does).
`ClientHandshake` and `ServerHandshake` take bytes and return bytes: the owner of a socket, of any kind, moves them.

An `Acceptor` admits peers that hold the key. Each handshake has a short-lived thread. A peer without the key costs at
most 4 KiB and five seconds, however slowly it sends. Beyond MAX_GUESTS at once, a guest that has had GREETS_WITHIN_S
gives way: the oldest from the address with the most guests. So nobody can keep places by just holding them.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import resource
import socket
import struct
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dataloaderjob.core.errors import AuthError, RemoteProtocolError
from dataloaderjob.core.frames import PROTOCOL

LENGTH = struct.Struct("<I")
DO_NOT_WAIT, CLOSE_ON_EXEC, TRUNCATED = map(
    int, (socket.MSG_DONTWAIT, socket.MSG_CMSG_CLOEXEC, socket.MSG_CTRUNC)
)
"""Message flags as plain ints, which combine in no time; those of `socket` take 2 µs."""
MAX_MESSAGE_NBYTES = 16 * 1024 * 1024
MAX_HELLO_NBYTES = 4096
"""Maximum number of bytes that an unauthenticated peer can make us hold."""
HANDSHAKE_TIMEOUT_S = 5.0
KEY_NBYTES = 32
MAX_GUESTS = 64
TELL_REFUSED_S = 60.0
"""Interval between two log lines about refused peers."""
NO_DESCRIPTOR_PAUSE_S = 0.05
GREETS_WITHIN_S = 0.5
"""A peer with the key needs milliseconds; a guest that takes longer than this gives way if places run out."""
Welcomed = Callable[[socket.socket, dict[str, Any]], None]
EVERYWHERE = "::"
"""All addresses of a machine, IPv6 and IPv4."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of one protocol that a process speaks."""

    oldest: int
    newest: int
    remedy: str
    """The remedy if a peer speaks none of them."""

    def common(self, challenge: dict[str, Any]) -> int:
        """The newest version that both sides speak. Raises AuthError if there is none."""
        newest = challenge.get("protocol")
        oldest = challenge.get("oldest", newest)
        if type(newest) is not int or type(oldest) is not int or not oldest <= newest:
            raise self._refusal(newest)
        if oldest > self.newest or newest < self.oldest:
            raise self._refusal(newest if oldest == newest else f"{oldest} to {newest}")
        return min(newest, self.newest)

    def check(self, reply: dict[str, Any]) -> None:
        """Raises AuthError unless the version that the peer chose is spoken here."""
        chosen = reply.get("protocol")
        if type(chosen) is not int or not self.oldest <= chosen <= self.newest:
            raise self._refusal(chosen)

    def _refusal(self, theirs: object) -> AuthError:
        ours = str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        return AuthError(f"protocol version {ours} is needed, the peer speaks {theirs}: {self.remedy}")


DATA = Versions(
    PROTOCOL, PROTOCOL, "install the same dataloaderjob version in the trainer, sidecar and feeder images"
)
"""Versions of the data path: frames have only one, and a job's images are of one release."""
CONTROL = Versions(
    3,
    3,
    "a job's images must be of the operator's release or the one before it: use such images, or a matching operator",
)
"""Versions of the messages with the supervisor (`core.supervision`), which an operator of another release polls.

A message or meaning that a peer of `newest` does not know requires a bump of `newest`. `oldest` follows, one behind, so
that each release speaks with the previous one. A key added to a message requires neither: peers ignore unknown keys.
"""


def on_machine(instance: str) -> str:
    """The address of a feeder for receivers in its network namespace: an abstract name, which is not a file and
    disappears with the process."""
    return f"\0dataloaderjob-feeder-{instance}"


def listen(host: str, port: int, *, backlog: int = 128) -> socket.socket:
    """Listens at a host name or number, or at an `on_machine` address; EVERYWHERE means IPv4 alone if there is no IPv6.
    Raises OSError."""
    if host.startswith("\0"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.bind(host)
            sock.listen(backlog)
        except OSError:
            sock.close()
            raise
        return sock
    if host == EVERYWHERE:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                (host, port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
        host = "0.0.0.0"  # noqa: S104  what the caller asked for
    return socket.create_server((host, port), family=family_of(host), backlog=backlog)


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def address_text(host: str, port: int) -> str:
    """host:port, with an IPv6 number in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> tuple[str, int]:
    """Returns the host, without brackets, and the port. Raises ValueError unless `text` is host:port."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not bare or (":" in bare and bare == host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"an address is needed as host:port, found {text!r}")
    return bare, int(port)


def new_key() -> bytes:
    return os.urandom(KEY_NBYTES)


def pack_message(message: dict[str, Any]) -> bytes:
    """Encodes a message: u32 length, then JSON."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(data)) + data


def parse_message(data: bytes | bytearray | memoryview, what: str = "a message") -> dict[str, Any]:
    """Parses a JSON object. Raises RemoteProtocolError, which calls the data `what`, if it is anything else."""
    try:
        message = json.loads(bytes(data))
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"{what} is not JSON") from exc
    if not isinstance(message, dict):
        raise RemoteProtocolError(f"{what} is not a JSON object")
    return message


def take_message(data: bytearray, limit: int) -> dict[str, Any] | None:
    """Takes the first message off the received data; None until it is complete. Raises RemoteProtocolError."""
    if len(data) < LENGTH.size:
        return None
    end = LENGTH.size + _length(data, limit)
    if len(data) < end:
        return None
    message = parse_message(data[LENGTH.size : end])
    del data[:end]
    return message


def _length(data: bytes | bytearray, limit: int) -> int:
    """Size in bytes of the message whose length is at the start of `data`."""
    (n,) = LENGTH.unpack_from(data)
    if n > limit:
        raise RemoteProtocolError(f"a message of {n} bytes exceeds {limit}")
    return int(n)


def recv_exactly(sock: socket.socket, n: int) -> bytes:
    """Receives `n` bytes. Raises ConnectionError if the peer closes the connection first."""
    data = bytearray(n)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the peer closed the connection")
        view = view[got:]
    return bytes(data)


def send_message(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(pack_message(message))


def recv_message(sock: socket.socket) -> dict[str, Any]:
    return parse_message(recv_exactly(sock, _length(recv_exactly(sock, LENGTH.size), MAX_MESSAGE_NBYTES)))


def new_challenge(versions: Versions = CONTROL) -> dict[str, Any]:
    """The first message, from the side that accepted."""
    return {"nonce": os.urandom(16).hex(), "protocol": versions.newest, "oldest": versions.oldest}


def answer_challenge(
    key: bytes, challenge: dict[str, Any], *, role: str, name: str, job: str, facts: dict[str, Any],
    versions: Versions = CONTROL,
) -> dict[str, Any]:  # fmt: skip
    """The second message, from the side that connected. Raises AuthError if the sides have no common version."""
    chosen = versions.common(challenge)
    nonce = os.urandom(16).hex()
    fields = (challenge.get("nonce"), nonce, role, name, job, facts)
    return {
        "nonce": nonce, "protocol": chosen, "role": role, "name": name, "job": job, "facts": facts,
        "mac": _mac(key, "connector", *fields),
    }  # fmt: skip


def accept_answer(
    key: bytes, challenge: dict[str, Any], reply: dict[str, Any], *, job: str, facts: dict[str, Any],
    versions: Versions = CONTROL,
) -> dict[str, Any]:  # fmt: skip
    """Checks the answer and returns the third message, which vouches for us. Raises AuthError with the reason."""
    versions.check(reply)
    fields = (challenge["nonce"], *(reply.get(k) for k in ("nonce", "role", "name", "job", "facts")))
    if not _same(_mac(key, "connector", *fields), reply.get("mac")):
        raise AuthError("the peer does not hold this job's key")
    if reply["job"] != job:
        raise AuthError(f"this is job {job!r}, the peer belongs to job {reply['job']!r}")
    return {"mac": _mac(key, "acceptor", challenge["nonce"], reply["nonce"], facts), "facts": facts}


def confirm_acceptance(
    key: bytes, challenge: dict[str, Any], reply: dict[str, Any], last: dict[str, Any]
) -> dict[str, Any]:
    """Checks the third message; returns the acceptor's facts. Raises AuthError with the reason."""
    if "error" in last:
        raise AuthError(f"the peer refused: {last['error']}")
    facts = last.get("facts", {})
    expected = _mac(key, "acceptor", challenge.get("nonce"), reply["nonce"], facts)
    if not _same(expected, last.get("mac")):
        raise AuthError("the peer that answered does not hold this job's key")
    if not isinstance(facts, dict):
        raise RemoteProtocolError(f"a peer's facts are a JSON object, found {facts!r}")
    return facts


def _mac(key: bytes, label: str, *fields: object) -> str:
    text = json.dumps([label, *fields], separators=(",", ":"), sort_keys=True)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _same(expected: str, found: object) -> bool:
    """Compares in constant time; a peer may send anything, including non-ASCII text."""
    return hmac.compare_digest(expected.encode(), str(found).encode("utf-8", "replace"))


class Handshake:
    """Either side of the handshake: send what `receive` returns, until `done`."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.done = False

    def _on(self, message: dict[str, Any]) -> bytes:
        raise NotImplementedError

    @property
    def wanted(self) -> int:
        """Bytes that the incoming message still lacks, for callers that must not read more."""
        have = len(self._data)
        if have < LENGTH.size:
            return LENGTH.size - have
        return LENGTH.size + _length(self._data, MAX_HELLO_NBYTES) - have

    def receive(self, data: bytes | bytearray | memoryview) -> bytes:
        """Returns the bytes to send. Raises AuthError, RemoteProtocolError."""
        self._data += data
        answer = b""
        while not self.done and (message := take_message(self._data, MAX_HELLO_NBYTES)) is not None:
            try:
                answer += self._on(message)
            except (
                RecursionError
            ) as exc:  # JSON that is read, but is too deep to be written again for its MAC
                raise RemoteProtocolError("a message of the handshake is nested too deeply") from exc
        return answer

    @property
    def rest(self) -> bytes:
        """Bytes that arrived after the handshake."""
        return bytes(self._data)


class ClientHandshake(Handshake):
    """The side that connected."""

    def __init__(
        self, key: bytes, *, role: str, name: str, job: str, facts: dict[str, Any] | None = None,
        versions: Versions = CONTROL,
    ) -> None:  # fmt: skip
        super().__init__()
        self._key = key
        self._fields: dict[str, Any] = {
            "role": role, "name": name, "job": job, "facts": facts or {}, "versions": versions,
        }  # fmt: skip
        self._challenge: dict[str, Any] | None = None
        self._reply: dict[str, Any] = {}
        self.facts: dict[str, Any] | None = None
        """The peer's facts, once the handshake is done."""

    def _on(self, message: dict[str, Any]) -> bytes:
        if self._challenge is not None:
            self.done, self.facts = True, confirm_acceptance(self._key, self._challenge, self._reply, message)
            return b""
        self._challenge, self._reply = message, answer_challenge(self._key, message, **self._fields)
        return pack_message(self._reply)


class ServerHandshake(Handshake):
    """The side that accepted; it sends `greeting` first."""

    def __init__(
        self, key: bytes, *, job: str, facts: dict[str, Any] | None = None, versions: Versions = CONTROL
    ) -> None:
        super().__init__()
        self._key, self._job, self._facts, self._versions = key, job, facts or {}, versions
        self._challenge = new_challenge(versions)
        self.greeting = pack_message(self._challenge)
        self.peer: dict[str, Any] | None = None
        """The peer's answer (role, name, facts, and the protocol version it chose), once the handshake is done."""

    def _on(self, message: dict[str, Any]) -> bytes:
        last = accept_answer(
            self._key, self._challenge, message, job=self._job, facts=self._facts, versions=self._versions
        )
        self.done, self.peer = True, message
        return pack_message(last)


def connect(
    address: tuple[str, int], key: bytes, *, role: str, name: str, job: str, versions: Versions = CONTROL,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> socket.socket:  # fmt: skip
    """Connects and completes the handshake; the socket has no timeout. Raises OSError, ProtocolError."""
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        greet(sock, key, role=role, name=name, job=job, versions=versions, timeout_s=timeout_s)
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def greet(
    sock: socket.socket,
    key: bytes,
    *,
    role: str,
    name: str,
    job: str,
    facts: dict[str, Any] | None = None,
    versions: Versions = CONTROL,
    timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> dict[str, Any]:
    """Runs the connecting side of the handshake. Returns the peer's facts; leaves no timeout on the socket."""
    sock.settimeout(timeout_s)
    handshake = ClientHandshake(key, role=role, name=name, job=job, facts=facts, versions=versions)
    while handshake.facts is None:
        sock.sendall(handshake.receive(recv_exactly(sock, handshake.wanted)))
    sock.settimeout(None)
    return handshake.facts


def welcome(
    sock: socket.socket, key: bytes, *, job: str, facts: dict[str, Any] | None = None, versions: Versions = CONTROL
) -> dict[str, Any]:  # fmt: skip
    """Runs the accepting side. Returns the peer's answer (role, name, facts); sends refusals to the peer."""
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    handshake = ServerHandshake(key, job=job, facts=facts, versions=versions)
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
    return handshake.peer


def most_guests(wanted: int) -> int:
    """The limit on guests: `wanted`, or a fourth of the descriptors if that is less. Admitted peers have the others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft // 4)


class Reserve:
    """A spare descriptor for when none are left.

    A connection that cannot be accepted waits at the listening socket and would wake the owner's loop without a pause.
    With the spare released for a moment, it is accepted and closed; the peer connects again.
    """

    def __init__(self) -> None:
        self._fd: int | None = _null()

    def turn_away(self, listening: socket.socket, error: OSError) -> bool:
        """Closes the waiting connection. Returns False if the error is not a lack of descriptors."""
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return False
        self.close()
        with contextlib.suppress(OSError):
            listening.accept()[0].close()
        try:
            self._fd = _null()
        except OSError:  # another thread or process was quicker
            time.sleep(NO_DESCRIPTOR_PAUSE_S)
            return False
        return True

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _null() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class _Guest(NamedTuple):
    """A peer that has not yet proved that it holds the key."""

    address: str
    deadline: float


class Acceptor:
    """A listening socket and the handshakes in progress."""

    def __init__(
        self, host: str, port: int, *, key: bytes, job: str, facts: dict[str, Any], welcomed: Welcomed,
        versions: Versions = CONTROL,
    ) -> None:  # fmt: skip
        """`welcomed(socket, answer)` is called in the handshake's thread and owns the socket from then on.

        Raises OSError if the address cannot be bound.
        """
        self._versions = versions
        self._key, self._job, self._facts, self._welcomed = key, job, facts, welcomed
        self._lock = threading.Lock()
        self._most = most_guests(MAX_GUESTS)
        self._guests: dict[socket.socket, _Guest] = {}
        """Guests, the oldest first."""
        self.sock = listen(host, port)
        self.sock.setblocking(False)
        self._reserve = Reserve()
        self._refused, self._why_refused, self._tell_at = 0, "", 0.0

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    def accept_all(self) -> None:
        """Accepts all connections that wait at the listening socket. Never blocks, never raises because of a guest."""
        for _ in range(MAX_GUESTS):  # a peer that connects without a pause does not keep the loop here
            try:
                guest, address = self.sock.accept()
            except OSError as exc:
                if not self._reserve.turn_away(self.sock, exc):
                    return
                continue
            with self._lock:
                full = len(self._guests) >= self._most and not self._make_way()
                if not full:
                    self._guests[guest] = _Guest(str(address[:1]), time.monotonic() + HANDSHAKE_TIMEOUT_S)
            if full:
                guest.close()
                continue
            try:
                threading.Thread(target=self._greet, args=(guest,), name="dlj-handshake", daemon=True).start()
            except RuntimeError:  # no more threads
                self._forget(guest)
                guest.close()

    def _make_way(self) -> bool:
        """Ends a guest to make room for another, if one has had enough time. Many peers with the key may arrive at
        once, and each is done within milliseconds."""
        long_ago = time.monotonic() + HANDSHAKE_TIMEOUT_S - GREETS_WITHIN_S
        late = [(sock, guest) for sock, guest in self._guests.items() if guest.deadline < long_ago]
        if not late:
            return False
        often = Counter(guest.address for guest in self._guests.values())
        self._end(max(late, key=lambda found: often[found[1].address])[0])
        return True

    def _end(self, guest: socket.socket) -> None:
        """Ends a guest: its thread finds the connection closed."""
        self._guests.pop(guest, None)
        with contextlib.suppress(OSError):
            guest.shutdown(socket.SHUT_RDWR)

    def _forget(self, guest: socket.socket) -> None:
        with self._lock:
            self._guests.pop(guest, None)

    def expire(self) -> None:
        """Ends handshakes past their deadline. Call about once a second."""
        now = time.monotonic()
        with self._lock:
            for sock in [sock for sock, guest in self._guests.items() if guest.deadline < now]:
                self._end(sock)
        if self._refused and now >= self._tell_at:
            import logging  # a sidecar and a private service start without it

            text = "%d connections were refused since the last such line; the reason for the last one: %s"
            logging.getLogger(__name__).info(text, self._refused, self._why_refused)
            self._refused, self._tell_at = 0, now + TELL_REFUSED_S

    def close(self) -> None:
        self.sock.close()
        self._reserve.close()

    def _greet(self, guest: socket.socket) -> None:
        try:
            tune(guest)
            answer = welcome(guest, self._key, job=self._job, facts=self._facts, versions=self._versions)
        except Exception as exc:  # untrusted bytes end only the connection that sent them
            self._forget(guest)
            guest.close()
            if not isinstance(exc, ConnectionError):  # such as a probe of the port every few seconds
                self._refused, self._why_refused = self._refused + 1, str(exc)
            return
        self._forget(guest)
        self._welcomed(guest, answer)


def tune(sock: socket.socket) -> None:
    """Sets options for a bulk link over TCP: no delay, dead peers found in 15 s. Links within a machine need none.

    The host chooses the congestion control, because its cost depends on the host's networks. Over loopback on a host
    with BBR, the receiver takes 0.24 CPU-s/GB and 70 batches of 38.5 MB a second; with cubic, 0.20 and 95.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 15000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def peer_uid(sock: socket.socket) -> int:
    """The user of the process at the other end of a connected Unix socket, as the kernel reports it."""
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that arrived with a message, from the ancillary data of `recvmsg`."""
    received = array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(content[: len(content) - len(content) % received.itemsize])
    return received.tolist()
