"""TLS 1.3 below the handshake, on all TCP connections of a job with `spec.loader.tls: true`.

`core.credentials` loads a process's certificates. Both sides verify each other. A certificate names its holder's part
in the job, because the addresses of pods change. The handshake (`core.handshake`) still checks roles and keys.

The accepting side begins with an unencrypted message, which reveals nothing about the job. From this message, a peer
without TLS learns what to change. The connecting side waits for the message and answers its challenge (`core.opening`).
It closes a connection that begins with anything else.

A `TlsConnection` reads and writes the socket itself, and uses `ssl` only to encrypt and decrypt bytes in memory.
Therefore, a thread may send while another one waits for bytes, which `ssl` does not allow on its own sockets. Unlike
`ssl`, a `TlsConnection` reads the socket in large pieces. Over loopback, a receiver then needs 0.7 to 0.9 CPU-s/GB,
compared with 0.84 to 0.93 for the sockets of `ssl`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from typing import IO

from dataloaderjob.core.errors import AuthError
from dataloaderjob.core.sockets import LENGTH, TLS, Connection, length_of, pack_message, parse_message
from dataloaderjob.core.texts import clean

RECORD_NBYTES = 16 * 1024
"""Maximum size of a TLS record."""
STAGING_NBYTES = 128 * 1024
"""Maximum number of bytes that are read from a socket, or encrypted for it, at a time."""
MAX_OPENING_NBYTES = 16 * 1024
"""Maximum number of encrypted bytes that a peer may send before its certificate is verified. An honest peer sends 2
KB."""
FIELD = "spec.loader.tls"
NOT_TLS = (
    f"the peer does not use TLS, but this process does: all of a job's pods must run a release that supports {FIELD}; "
    f"update their images, or start the job with {FIELD}: false"
)
NEEDS_TLS = (
    f"this job has {FIELD}: true, but the connection does not use TLS: update this pod's image to a release that "
    f"supports {FIELD}, or start the job with {FIELD}: false"
)
CHALLENGE = "challenge"
"""Key of the challenge in the first message. `core.opening` answers the challenge."""
MAX_PREAMBLE_NBYTES = 4096
MAX_CHALLENGE = 64
_WAIT_ALL = int(socket.MSG_WAITALL)
TLS_FIRST = b"\x16"
"""First byte that a peer under TLS sends. It is the type of the first record."""
_staging = threading.local()


def preamble(more: dict[str, str]) -> bytes:
    """Returns the first message of a port under TLS."""
    return pack_message({"tls": 1, "error": NEEDS_TLS, **more})


PREAMBLE = preamble({})
"""The first message of a port under TLS in a release without challenges."""


def new_context(protocol: ssl._SSLMethod) -> ssl.SSLContext:
    """Returns a context that verifies the peer, but has no certificates yet."""
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        made.num_tickets = 0  # connections are long-lived, and nobody resumes one
    return made


def load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Makes new connections of `context` use a certificate and its key. `ssl` reads only files, so both are passed in
    memfds that exist only during this call. Raises ssl.SSLError, and leaves the context unchanged, if certificate and
    key do not match."""
    with contextlib.ExitStack() as stack:
        paths = []
        for content in (certificate, key):
            fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            os.write(fd, content)
            paths.append(f"/proc/self/fd/{fd}")
        new_context(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*paths)
        context.load_cert_chain(*paths)


class TlsConnection(Connection):
    """A TCP connection under TLS. One thread receives, and any thread may send.

    Its methods behave like a socket's. If `send` raises BlockingIOError, it has kept the bytes. Call it again with the
    same bytes. More bytes may be appended to them.
    """

    transport = TLS

    @classmethod
    def over(
        cls, sock: socket.socket, context: ssl.SSLContext, server: str | None,
        prove: Callable[[str], bytes] | None = None,
    ) -> TlsConnection:  # fmt: skip
        """Takes over a connected socket. `server` is the name that the peer's certificate must have. It is None on the
        accepting side, where the peer may have any certificate of this job. `prove` answers the peer's challenge
        (`core.opening`)."""
        timeout = sock.gettimeout()
        made = cls(sock.family, sock.type, sock.proto, fileno=sock.detach())
        made.settimeout(timeout)
        made._incoming, made._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        made._object = context.wrap_bio(
            made._incoming, made._outgoing, server_side=server is None, server_hostname=server
        )
        made._state, made._sending = threading.Lock(), threading.Lock()
        made._preamble = None if server is None else bytearray()
        made._prove = prove
        return made

    _incoming: ssl.MemoryBIO
    _outgoing: ssl.MemoryBIO
    _object: ssl.SSLObject
    _state: threading.Lock
    """Held while `ssl` works on memory, never while the socket may block."""
    _sending: threading.Lock
    """Held while bytes are sent, so that they are sent in the order in which they were encrypted."""
    _preamble: bytearray | None
    """The part of the peer's unencrypted message that has arrived. None once it is complete, and on the accepting
    side."""
    _prove: Callable[[str], bytes] | None
    _unsent = memoryview(b"")
    """Encrypted bytes that the socket has not accepted yet."""
    _taken = 0
    """Number of the caller's bytes that `_unsent` contains in encrypted form."""
    _starved = False
    """True if the bytes that have been read contain no complete record."""
    _received = 0
    """Number of encrypted bytes that were received before the peer was verified."""
    patience_s = float("inf")
    """Maximum total time that a call with MSG_WAITALL waits while bytes arrive. Between two arrivals, the socket's own
    timeout applies."""
    established = False
    """True once the peer is verified. On the connecting side, the peer may still refuse this side's certificate."""

    @property
    def buffered(self) -> bool:
        """True if this process holds bytes that no call has returned yet, and that `poll` does not report."""
        return (
            self.established
            and not self._starved
            and (self._incoming.pending > 0 or self._object.pending() > 0)
        )

    # Opening

    def establish(self) -> None:
        """Completes TLS's handshake, which verifies the peer. Raises BlockingIOError while a non-blocking socket has to
        wait. Raises AuthError, with the reason, if the peer is refused. Raises OSError."""
        while self._prove is not None and self._preamble is not None:  # its challenge comes first
            self._fetch(RECORD_NBYTES)
        while not self.established:
            try:
                with self._state:
                    self._object.do_handshake()
                self.established = True
            except ssl.SSLWantReadError:
                self._push()
                self._fetch(RECORD_NBYTES)
            except ssl.SSLError as exc:
                self._say_why(exc)
            self._push()

    def _say_why(self, exc: ssl.SSLError) -> None:
        with contextlib.suppress(OSError):
            self._push()  # the alert
        raise refusal(exc) from exc

    # Input

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        self.establish()
        pieces: list[bytes] = []
        left = nbytes
        while left:
            try:
                with self._state:
                    piece = self._object.read(min(left, RECORD_NBYTES))
            except ssl.SSLWantReadError:
                self._starved = True
                if pieces or not self._fetch(min(left - RECORD_NBYTES, STAGING_NBYTES), flags):
                    break
                continue
            except ssl.SSLError as exc:
                if _is_end(exc):
                    break
                raise refusal(exc) from exc
            if not piece:
                break
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def recv_into(  # type: ignore[override]
        self, buffer: bytearray | memoryview, nbytes: int = 0, flags: int = 0
    ) -> int:
        self.establish()
        target = memoryview(buffer).cast("B")
        if nbytes:
            target = target[:nbytes]
        filled, wanted, waited_s = self._decrypt(target), len(target), 0.0
        waits = flags & _WAIT_ALL
        while filled < wanted and (waits or not filled):
            began = time.monotonic() if waits else 0.0
            try:
                got = self._fetch(STAGING_NBYTES, flags & ~_WAIT_ALL)
            except BlockingIOError:
                if filled:
                    break
                raise
            if not got:
                break
            filled += self._decrypt(target[filled:])
            if waits and (waited_s := waited_s + time.monotonic() - began) > self.patience_s and filled:
                break
        return filled

    def _decrypt(self, target: memoryview) -> int:
        """Decrypts received bytes until `target` is full. Returns the number of bytes."""
        read, filled, end = self._object.read, 0, len(target)
        try:
            with self._state:
                while filled < end:
                    got = int(read(RECORD_NBYTES, target[filled : filled + RECORD_NBYTES]))
                    if not got:
                        break
                    filled += got
        except ssl.SSLWantReadError:
            self._starved = True
        except ssl.SSLError as exc:
            if not _is_end(exc):
                raise refusal(exc) from exc
        return filled

    def _fetch(self, nbytes: int, flags: int = 0) -> int:
        """Reads encrypted bytes from the socket. Returns their number, which is 0 at the end of the stream. Raises
        OSError and AuthError."""
        if nbytes <= RECORD_NBYTES:
            data: bytes | memoryview = super().recv(RECORD_NBYTES, flags)
        else:
            staging = getattr(_staging, "buffer", None)
            if staging is None:
                staging = _staging.buffer = memoryview(bytearray(STAGING_NBYTES))
            data = staging[: super().recv_into(staging[:nbytes], 0, flags)]
        nbytes = len(data)
        if not self.established:
            data = self._opening(data)
        self._starved = False
        with self._state:
            if nbytes:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
        return nbytes

    def _opening(self, data: bytes | memoryview) -> bytes | memoryview:
        """Checks the peer's first bytes. Returns those that belong to TLS. Raises ConnectionError and AuthError."""
        if not data:
            raise ConnectionError("the peer closed the connection while TLS was being set up")
        if not self._received and self._preamble is None and bytes(data[:1]) != TLS_FIRST:
            raise AuthError(NEEDS_TLS)
        self._received += len(data)
        if self._received > MAX_OPENING_NBYTES:
            raise AuthError(f"the peer sent more than {MAX_OPENING_NBYTES} bytes before it was verified")
        if self._preamble is None:
            return data
        self._preamble += bytes(data)
        have = self._preamble
        if len(have) < LENGTH.size or len(have) < (end := LENGTH.size + length_of(have, MAX_PREAMBLE_NBYTES)):
            return b""
        self._preamble = None
        challenge = check_preamble(have[LENGTH.size : end])
        if challenge and self._prove is not None:
            self._outgoing.write(self._prove(challenge))
        return bytes(have[end:])

    # Output

    def send(self, data: bytes | bytearray | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        return self._send((data,), flags)

    def sendall(self, data: bytes | bytearray | memoryview, flags: int = 0) -> None:  # type: ignore[override]
        view = memoryview(data).cast("B")
        while view:
            view = view[self._send((view,), flags) :]

    def sendmsg(self, buffers: Iterable[bytes | bytearray | memoryview]) -> int:  # type: ignore[override]
        return self._send(buffers, 0)

    def sendfile(self, file: IO[bytes], offset: int = 0, count: int | None = None) -> int:  # type: ignore[override]
        file.seek(offset)
        sent = 0
        while count is None or sent < count:
            piece = file.read(STAGING_NBYTES if count is None else min(STAGING_NBYTES, count - sent))
            if not piece:
                break
            self.sendall(piece)
            sent += len(piece)
        return sent

    def _send(self, buffers: Iterable[bytes | bytearray | memoryview], flags: int) -> int:
        self.establish()
        with self._sending:
            if not self._unsent:
                self._taken = self._encrypt(buffers)
            self._push_locked(flags)
            sent, self._taken = self._taken, 0
            return sent

    def _encrypt(self, buffers: Iterable[bytes | bytearray | memoryview]) -> int:
        """Encrypts the first bytes of `buffers`, at most STAGING_NBYTES, into `_unsent`. Returns their number."""
        taken = 0
        with self._state:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")[: STAGING_NBYTES - taken]
                while view:
                    written = self._object.write(view)
                    taken, view = taken + written, view[written:]
                if taken >= STAGING_NBYTES:
                    break
            self._unsent = memoryview(self._outgoing.read())
        return taken

    def _push(self) -> None:
        """Sends the bytes that TLS itself needs to send, such as its handshake and alerts."""
        with self._sending:
            if not self._unsent:
                with self._state:
                    self._unsent = memoryview(self._outgoing.read())
            self._push_locked(0)

    def _push_locked(self, flags: int) -> None:
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent, flags) :]


def check_preamble(data: bytes | bytearray) -> str:
    """Returns the challenge in a port's first message, or an empty string if there is none. Raises AuthError unless the
    message announces TLS."""
    message = parse_message(data)
    if message.get("tls") != 1:
        raise AuthError(NOT_TLS if "nonce" in message else f"the peer refused: {clean(message.get('error'))}")
    challenge = message.get(CHALLENGE)
    return challenge if isinstance(challenge, str) and len(challenge) <= MAX_CHALLENGE else ""


def _is_end(exc: ssl.SSLError) -> bool:
    """Returns True if the peer has closed the connection. Frames have lengths, so readers notice an early end."""
    return isinstance(exc, ssl.SSLZeroReturnError | ssl.SSLEOFError) or "EOF" in str(exc.reason)


def refusal(exc: ssl.SSLError) -> AuthError:
    """Returns the error for a failure of TLS, with the remedy."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return AuthError(f"the peer's certificate is refused: {_remedy(exc.verify_message)}")
    reason = str(exc.reason or exc).replace("_", " ").lower()
    if "alert" in reason:
        what = reason.rpartition("alert ")[2]
        return AuthError(f"the peer refused the certificate of this process: {_remedy(what)}")
    return AuthError(
        f"TLS failed ({reason}): somebody may have altered bytes in transit; the connection is closed"
    )


def _remedy(why: str) -> str:
    if "expired" in why or "not yet valid" in why:
        return (
            f"{why}; the operator renews a job's certificates, so check that it runs, that this pod's clock is right, "
            "and that the pod is not older than two years"
        )
    if "mismatch" in why:
        return f"{why}; another part of the job, or another process, answers there"
    if any(words in why for words in ("issuer", "self-signed", "self signed", "unknown ca")):
        return f"{why}; it is not from this job's authority: it belongs to another job, or to an earlier one"
    return why
