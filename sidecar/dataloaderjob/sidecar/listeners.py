"""The sidecar's listening sockets, served by the parent's loop. Clients cannot block the loop.

/metrics, /healthz and /status are served over HTTP/1.0, one short answer per connection. The Unix socket is for
trainers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import selectors
import socket
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dataloaderjob.core import acceptor, ipc, sockets
from dataloaderjob.core.crowds import Crowds
from dataloaderjob.core.errors import DataLoaderJobError, InputError, RemoteProtocolError, first_line

MAX_REQUEST_NBYTES = 8192
MAX_CLIENTS = 256
ACCEPTS_AT_ONCE = 32
BACKLOG = 1024
CLIENT_TIMEOUT_S = 2.0
"""Time that a client has to send its request, and the same time again to read the answer."""
Handler = Callable[[str], tuple[int, str, str]]
"""A function that answers a path with (status, content type, body)."""
REASONS = {200: "OK", 404: "Not Found", 400: "Bad Request", 503: "Service Unavailable"}
HELLO_TIMEOUT_S = 5.0
MAX_HELLO_NBYTES = 8 * 1024 * 1024
"""Maximum size, in bytes, of a trainer's hello. A hello that gives back the maximum number of leases takes 3 MB."""
MAX_HELLOS_NBYTES = 32 * 1024 * 1024
"""Maximum total size, in bytes, of all incomplete hellos. A node's trainers never send this much."""
MAX_GUESTS = 256


@dataclass(slots=True, eq=False)
class HttpClient:
    """A connection to the HTTP port."""

    sock: socket.socket
    deadline: float
    source: str = ""
    """The client's address."""
    head: bytearray = field(default_factory=bytearray)
    out: bytes = b""

    def close(self) -> None:
        self.sock.close()


@dataclass(slots=True, eq=False)
class Guest:
    """A trainer's connection until its first message is complete."""

    sock: socket.socket
    deadline: float
    source: str = ""
    """The user of the trainer process."""
    incoming: ipc.Assembler = field(default_factory=lambda: ipc.Assembler(MAX_HELLO_NBYTES))
    fds: list[int] = field(default_factory=list)
    stranger: int | None = None
    """The uid of a user who must be refused; None if the user is admitted."""

    def close(self) -> None:
        self.sock.close()
        fds, self.fds = self.fds, []
        for fd in fds:
            os.close(fd)

    def answer(self, packets: list[bytes], fds: list[int] | None = None) -> None:
        """Sends all packets without waiting, because the socket's buffer is far larger than any answer."""
        socket.send_fds(self.sock, [packets[0]], fds or [])
        for packet in packets[1:]:
            self.sock.send(packet)


OnMessage = Callable[[Guest, ipc.Packet], None]
"""Takes ownership of the guest. If the call raises, the guest is sent the reason, and its connection is closed."""
Peer = TypeVar("Peer", HttpClient, Guest)


class Listener(ABC, Generic[Peer]):
    """A listening socket and at most `most` peers, each with a deadline. The owner's loop calls `expire`."""

    def __init__(self, sock: socket.socket, select: selectors.BaseSelector, most: int) -> None:
        sock.setblocking(False)
        self._sock, self._select, self._most = sock, select, acceptor.most_guests(most)
        self._peers: dict[Peer, None] = {}
        """Peers, oldest first."""
        self._crowds: Crowds[Peer] = Crowds()
        self._reserve = acceptor.Reserve()
        select.register(sock, selectors.EVENT_READ, self._accept)

    @abstractmethod
    def _welcome(self, sock: socket.socket, source: str) -> Peer: ...

    @abstractmethod
    def _on_ready(self, peer: Peer) -> None: ...

    def expire(self, now: float) -> None:
        """Closes the connections of peers whose deadlines have passed."""
        for peer in [p for p in self._peers if p.deadline < now]:
            self._forget(peer)
            peer.close()

    def close_in_child(self) -> None:
        """Closes all sockets in a forked child. Otherwise, peers would not notice when the parent closes them."""
        self._sock.close()
        self._reserve.close()
        for peer in self._peers:
            peer.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, found = self._sock.accept()
            except OSError as exc:
                self._reserve.turn_away(self._sock, exc)
                return
            if len(self._peers) >= self._most:  # idle clients must not block new ones
                oldest = self._crowds.first_to_go()
                self._forget(oldest)
                oldest.close()
            sock.setblocking(False)
            peer = self._welcome(sock, str(found[0]) if isinstance(found, tuple) else "")
            self._peers[peer] = None
            self._crowds.add(peer.source, peer)
            self._select.register(sock, selectors.EVENT_READ, functools.partial(self._ready, peer))

    def _ready(self, peer: Peer) -> None:
        if peer in self._peers:  # another peer may have replaced it in this turn
            self._on_ready(peer)

    def _forget(self, peer: Peer) -> None:
        if peer in self._peers:
            del self._peers[peer]
            self._crowds.remove(peer.source, peer)
            self._select.unregister(peer.sock)


class HttpServer(Listener[HttpClient]):
    """An HTTP server that answers GET requests for the handler's paths."""

    def __init__(self, host: str, port: int, handler: Handler, select: selectors.BaseSelector) -> None:
        """Starts listening. Raises InputError if the server cannot listen at this address."""
        try:
            sock = sockets.listen(host, port, backlog=BACKLOG)
        except OSError as exc:
            address = sockets.address_text(host, port)
            raise InputError(
                f"cannot serve metrics at {address} ({exc.strerror}): choose another port"
            ) from exc
        self.port: int = sock.getsockname()[1]
        self._handler = handler
        super().__init__(sock, select, MAX_CLIENTS)

    def _welcome(self, sock: socket.socket, source: str) -> HttpClient:
        return HttpClient(sock, time.monotonic() + CLIENT_TIMEOUT_S, source)

    def _on_ready(self, peer: HttpClient) -> None:
        try:
            if not peer.out:
                data = peer.sock.recv(MAX_REQUEST_NBYTES)
                peer.head += data
                if data and b"\r\n\r\n" not in peer.head and len(peer.head) < MAX_REQUEST_NBYTES:
                    return
                peer.out = self._answer(bytes(peer.head))
                peer.deadline = time.monotonic() + CLIENT_TIMEOUT_S
                self._select.modify(peer.sock, selectors.EVENT_WRITE, lambda: self._ready(peer))
            peer.out = peer.out[peer.sock.send(peer.out) :]
        except BlockingIOError:
            return
        except OSError:
            peer.out = b""
        if not peer.out:
            self._forget(peer)
            peer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split()
        if len(words) != 3 or words[0] != b"GET":
            status, kind, body = 400, "text/plain", "only GET is served here\n"
        else:
            status, kind, body = self._handler(words[1].decode("ascii", "replace"))
        data = body.encode()
        return (
            f"HTTP/1.0 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        ).encode() + data


class TrainerListener(Listener[Guest]):
    """The Unix socket for trainers. It keeps each trainer's connection until the first message is complete."""

    def __init__(
        self,
        path: str,
        select: selectors.BaseSelector,
        on_message: OnMessage,
        *,
        private: bool = False,
        anyone: bool = False,
    ) -> None:
        """`private`: serve only processes of this user. `anyone`: serve processes of all users. By default, processes
        of this user and this group are served. Raises InputError if it cannot listen at `path`."""
        self._private, self._on_message, self._path = private, on_message, path
        super().__init__(listen(path, anyone=anyone), select, MAX_GUESTS)
        self._inode = os.stat(path).st_ino

    def _welcome(self, sock: socket.socket, source: str) -> Guest:  # noqa: ARG002  a Unix socket has none
        uid = sockets.peer_uid(sock)
        guest = Guest(sock, time.monotonic() + HELLO_TIMEOUT_S, f"user {uid}")
        if self._private and uid != os.getuid():
            guest.stranger = uid
        return guest

    def _on_ready(self, peer: Guest) -> None:
        try:
            data, fds = ipc.recv_with_fds(peer.sock)
            peer.fds += fds
            if len(peer.fds) > ipc.MAX_FDS:
                raise RemoteProtocolError(f"one message has more than {ipc.MAX_FDS} file descriptors")
            if not data:
                raise ConnectionError("the trainer closed the connection")
            # Another user gets an answer only now, because an answer is lost if the socket is closed with unread data.
            if peer.stranger is not None:
                raise RemoteProtocolError(
                    f"this sidecar serves only user {os.getuid()}, but the process belongs to user "
                    f"{peer.stranger}"
                )
            packet = peer.incoming.feed(data)
            if packet is None:
                if sum(guest.incoming.nbytes for guest in self._peers) > MAX_HELLOS_NBYTES:
                    raise RemoteProtocolError(
                        f"incomplete messages exceed {MAX_HELLOS_NBYTES} bytes in total: attach again"
                    )
                return
            self._forget(peer)
            self._on_message(peer, packet)
        except BlockingIOError:
            return
        except Exception as exc:  # untrusted input must never end the sidecar
            self._forget(peer)
            with contextlib.suppress(OSError):
                peer.answer(ipc.pack_json(ipc.Type.REFUSED, {"error": _reason(exc)}))
            peer.close()

    def close(self) -> None:
        """Removes the socket, unless another sidecar has replaced it."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        self._sock.close()


_SHORTAGES = (errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


def _reason(exc: Exception) -> str:
    if isinstance(exc, DataLoaderJobError):
        return str(exc)
    if isinstance(exc, OSError) and exc.errno in _SHORTAGES:
        return f"its files or memory cannot be set up on this machine ({first_line(exc)}): check `ulimit -a`"
    return f"the message is invalid ({first_line(exc)}): install the same dataloaderjob version on both sides"


def listen(path: str, *, anyone: bool = False) -> socket.socket:
    """Returns a listening socket at `path`, replacing one that a dead sidecar left behind. `anyone`: processes of all
    users may connect. Raises InputError.

    The socket gets its name only once it listens, so that every process that sees the socket can connect.
    """
    folder, name = os.path.split(path)
    unseen = os.path.join(folder, ("_" if name.startswith("~") else "~") + name[1:])
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    old = os.umask(0o111 if anyone else 0o117)
    try:
        for place in (path, unseen):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(place).st_mode):
                    raise InputError(f"{place} exists and is not a socket: choose another path")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unseen)
        sock.bind(unseen)
        sock.listen(BACKLOG)
        os.rename(unseen, path)
    except InputError:
        sock.close()
        raise
    except OSError as exc:
        sock.close()
        raise InputError(
            f"user {os.getuid()} cannot create a socket at {path} ({exc.strerror}): choose a folder that "
            "this user can write to"
        ) from exc
    finally:
        os.umask(old)
    sock.setblocking(False)
    return sock
