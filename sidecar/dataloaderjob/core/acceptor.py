"""A listening socket that admits peers with a job's key, and stays available while strangers without the key flood it.

The owner's loop waits for the acceptor's file descriptor and calls `serve`, which never blocks. A peer gets a thread
only after it has completed the handshake. Until then, it is a *guest*. A guest costs one file descriptor and at most 4
KiB, for at most five seconds.

Once there are MAX_GUESTS guests, each new one displaces the oldest guest from the address with the most guests. A peer
with the key completes the handshake within milliseconds. To displace it, a stranger would have to fill all places
within that time. Filling 1,024 places takes 250 ms at 4,000 connections per second. A stranger does not displace guests
from other addresses.

If the port needs TLS (`core.tls`), a guest that begins it costs 48 KB and 0.6 ms of CPU time. A guest that first proves
that it holds a key (`core.opening`) begins TLS at once. All other guests together get SHARE of the time and
MAX_UNPROVEN places. Guests from addresses with few guests come first. A call of `serve` returns after about TURN_S, so
that the owner can serve its connections.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dataloaderjob.core import opening, sockets
from dataloaderjob.core.allowance import Allowance
from dataloaderjob.core.crowds import Crowds
from dataloaderjob.core.errors import AuthError, ProtocolError
from dataloaderjob.core.handshake import CONTROL, HANDSHAKE_TIMEOUT_S, ServerHandshake, Versions
from dataloaderjob.core.keys import Key
from dataloaderjob.core.sockets import Connection
from dataloaderjob.core.tls import TLS_FIRST

if TYPE_CHECKING:
    from dataloaderjob.core.credentials import Credentials

MAX_GUESTS = 1024
BACKLOG = 4096
"""Maximum number of connections that wait to be accepted. This is enough while the loop is busy for a second. The
kernel may apply a lower limit."""
ACCEPTS_AT_ONCE = 64
"""Maximum number of peers accepted at once, so that a peer that keeps connecting does not monopolize the owner's
loop."""
TURN_S = 0.005
"""Seconds after which `serve` leaves the remaining guests to its next call."""
SHARE = 0.1
"""Share of the time that may be spent on TLS with guests without a proof. These are strangers, and peers from a release
without proofs."""
SAVED_S = 0.05
"""Seconds of that share that may be saved up. This is enough for 80 guests that connect at the same time."""
MAX_UNPROVEN = 64
"""Maximum number of guests that have begun TLS without a proof. Each of them costs 48 KB."""
TELL_REFUSED_S = 60.0
"""Seconds between two log lines about refused peers."""
NO_DESCRIPTOR_PAUSE_S = 0.05
Welcomed = Callable[[Connection, dict[str, Any]], None]


def most_guests(wanted: int) -> int:
    """Returns the limit on guests: `wanted`, or a quarter of the file descriptor limit if that is less. Admitted peers
    may use the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft // 4)


class Reserve:
    """A spare file descriptor, for use when the process has no others left.

    A connection that cannot be accepted stays in the listening socket's queue, and would keep waking the owner's loop.
    Closing the spare for a moment allows the connection to be accepted and closed. The peer then connects again.
    """

    def __init__(self) -> None:
        self._fd: int | None = _null()

    def turn_away(self, listening: socket.socket, error: OSError) -> bool:
        """Closes the waiting connection. Returns False if the error is not a lack of file descriptors, or if the spare
        could not be opened again."""
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


@dataclass(slots=True, eq=False)
class _Guest:
    """A peer that has not yet proved that it holds the key."""

    sock: socket.socket
    address: str
    deadline: float
    handshake: ServerHandshake
    greeted: bool = True
    """True once our own handshake has begun. If the port needs TLS, TLS is set up first."""
    silent: bool = True
    """True until the guest has begun TLS."""
    challenge: str = ""
    """The challenge that the guest's proof must answer. It is empty if the port does not need TLS."""
    proof: bytes = b""
    """The part of the guest's proof that has arrived."""
    proven: bool = True
    """False if the port needs TLS, and the guest sent something other than a proof."""


class Acceptor:
    """A listening socket and the handshakes in progress. One thread calls its methods."""

    def __init__(
        self, host: str, port: int, *, key: Key, job: str, facts: dict[str, Any], welcomed: Welcomed,
        versions: Versions = CONTROL, tls: Credentials | None = None,
    ) -> None:  # fmt: skip
        """Binds the address. Raises OSError if that fails.

        For each admitted peer, `welcomed(socket, answer)` is called in a new thread, which then owns the socket. `tls`
        contains the certificates of this process. It is None if the port does not need TLS.
        """
        self._versions, self._tls = versions, tls
        self._key, self._job, self._facts, self._welcomed = key, job, facts, welcomed
        self._most = most_guests(MAX_GUESTS)
        self._guests: dict[int, _Guest] = {}
        """Guests by file descriptor, oldest first."""
        self._crowds = Crowds[int]()
        """File descriptors of guests, by address."""
        self.sock = sockets.listen(host, port, backlog=BACKLOG)
        self.sock.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self.sock, select.EPOLLIN)
        self._unproven = select.epoll()
        """Watches the guests that did not send a proof."""
        self._begun = Crowds[int]()
        """File descriptors of guests that have begun TLS without a proof, by address."""
        self._allowance, self._paused = Allowance(SHARE, SAVED_S), False
        self._poll.register(self._unproven, select.EPOLLIN)
        self._reserve = Reserve()
        self._transport = sockets.transport_of(self.sock) if tls is None else sockets.TLS
        self._refused, self._why_refused, self._tell_at = 0, "", 0.0

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    def fileno(self) -> int:
        """Returns the file descriptor that is readable while `serve` has something to do."""
        return self._poll.fileno()

    def serve(self) -> None:
        """Continues handshakes and accepts waiting connections. Never blocks, and never raises because of a guest."""
        began = time.monotonic()
        self._resume(began)
        listening, crowd = self.sock.fileno(), self._unproven.fileno()
        ready = [fd for fd, _ in self._poll.poll(0, MAX_GUESTS)]
        for guest in self._in_turn(ready):
            self._continue(guest)
            if time.monotonic() - began > TURN_S:
                break
        if listening in ready:
            self._accept()
        if crowd in ready:
            self._serve_unproven()

    def _in_turn(self, fds: Iterable[int]) -> Iterator[_Guest]:
        """Yields the guests with these descriptors, those from the smallest crowds first. Skips a guest that has left
        before its turn."""
        found = [guest for fd in fds if (guest := self._guests.get(fd)) is not None]
        found.sort(key=lambda guest: self._crowds.size(guest.address))
        return (guest for guest in found if self._guests.get(guest.sock.fileno()) is guest)

    def _serve_unproven(self) -> None:
        """Continues with TLS for guests without a proof, until their share of the time is spent."""
        began = now = time.monotonic()
        for guest in self._in_turn([fd for fd, _ in self._unproven.poll(0, MAX_GUESTS)]):
            if self._allowance.left_s(now) <= 0:
                self._paused = True
                self._poll.modify(self._unproven, 0)
                return
            self._continue(guest)
            before, now = now, time.monotonic()
            self._allowance.spend(now - before)
            if now - began > TURN_S:
                return

    def _resume(self, now: float) -> None:
        if self._paused and self._allowance.left_s(now) > TURN_S:
            self._paused = False
            self._poll.modify(self._unproven, select.EPOLLIN)

    def expire(self) -> None:
        """Ends handshakes past their deadline. Call about once a second."""
        now = time.monotonic()
        self._resume(now)
        while self._guests:
            oldest = next(iter(self._guests.values()))
            if oldest.deadline > now:
                break
            self._end(oldest)
        if self._refused and now >= self._tell_at:
            import logging  # a sidecar and a private service start without it

            text = "%d connections were refused since the last such message; the reason for the latest: %s"
            logging.getLogger(__name__).info(text, self._refused, self._why_refused)
            self._refused, self._tell_at = 0, now + TELL_REFUSED_S

    def close(self) -> None:
        self._poll.close()
        self._unproven.close()
        self.sock.close()
        self._reserve.close()
        for guest in self._guests.values():
            guest.sock.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, found = self.sock.accept()
            except OSError as exc:
                if not self._reserve.turn_away(self.sock, exc):
                    return
                continue
            if len(self._guests) >= self._most:
                self._end(self._guests[self._crowds.first_to_go()])
            self._welcome(sock, found)

    def _welcome(self, sock: socket.socket, found: Any) -> None:
        """Sends the first message of the handshake to a new guest."""
        handshake = ServerHandshake(
            self._key, job=self._job, facts=self._facts, versions=self._versions, transport=self._transport
        )
        challenge, first = ("", handshake.greeting) if self._tls is None else opening.new_challenge()
        try:
            sock.setblocking(False)
            address = f"user {sockets.peer_uid(sock)}" if sock.family == socket.AF_UNIX else str(found[0])
            sock.send(first)  # its buffer has room
        except OSError:
            sock.close()
            return
        fd = sock.fileno()
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self._guests[fd] = _Guest(
            sock, address, deadline, handshake, greeted=self._tls is None, challenge=challenge
        )
        self._crowds.add(address, fd)
        self._poll.register(fd, select.EPOLLIN)

    def _continue(self, guest: _Guest) -> None:
        """Continues a guest's handshake. Reads no more than the handshake needs, because later bytes belong to the
        socket's next owner."""
        try:
            if not guest.greeted:
                self._set_up_tls(guest)
            while not guest.handshake.done:
                data = guest.sock.recv(guest.handshake.wanted)
                if not data:  # such as a probe of the port every few seconds
                    self._end(guest)
                    return
                answer = guest.handshake.receive(data)
                if answer:
                    guest.sock.send(answer)
        except BlockingIOError:
            return
        except ProtocolError as exc:
            self._refuse(guest, exc)
            return
        except OSError:
            self._end(guest)
            return
        except Exception as exc:  # untrusted bytes end only the connection that sent them
            self._refuse(guest, AuthError(f"its answer is invalid: {exc!r}"))
            return
        self._admit(guest)

    def _set_up_tls(self, guest: _Guest) -> None:
        """Begins or continues with TLS, and greets the guest once it is verified. Raises BlockingIOError until then."""
        if guest.silent:
            self._begin_tls(guest)
        assert isinstance(guest.sock, Connection)  # noqa: S101
        guest.sock.establish()
        guest.greeted = True
        guest.sock.send(guest.handshake.greeting)

    def _begin_tls(self, guest: _Guest) -> None:
        """Reads the guest's proof, then begins TLS. Raises BlockingIOError if either has to wait."""
        assert self._tls is not None  # noqa: S101  without TLS, guests are greeted at once
        if guest.proven:
            self._read_proof(guest)
        fd = guest.sock.fileno()
        if not guest.proven:
            if len(self._begun) >= MAX_UNPROVEN:
                self._end(self._guests[self._begun.first_to_go()])
            self._begun.add(guest.address, fd)
        guest.silent, guest.sock = False, self._tls.accepted(guest.sock)

    def _read_proof(self, guest: _Guest) -> None:
        """Reads a guest's proof, and no bytes after it. Raises BlockingIOError unless the proof is complete and
        valid."""
        while not guest.proof or opening.wanted(guest.proof):
            if not guest.proof and guest.sock.recv(1, socket.MSG_PEEK) == TLS_FIRST:
                self._put_behind(guest)
            piece = guest.sock.recv(opening.wanted(guest.proof))
            if not piece:
                raise ConnectionError("the peer closed the connection")
            guest.proof += piece
        if not opening.is_proof(guest.proof, guest.challenge, self._key, self._versions.newest):
            self._put_behind(guest)

    def _put_behind(self, guest: _Guest) -> None:
        """Makes a guest without a valid proof wait until there is time for such guests. Always raises
        BlockingIOError."""
        guest.proven = False
        self._poll.unregister(guest.sock)
        self._unproven.register(guest.sock, select.EPOLLIN)
        raise BlockingIOError

    def _refuse(self, guest: _Guest, why: ProtocolError) -> None:
        self._refused, self._why_refused = self._refused + 1, f"{guest.address}: {why}"
        if isinstance(why, AuthError) and (guest.greeted or guest.silent):
            with contextlib.suppress(OSError):
                guest.sock.send(sockets.pack_message({"error": str(why)}))
        self._end(guest)

    def _admit(self, guest: _Guest) -> None:
        peer = guest.handshake.peer
        assert peer is not None  # noqa: S101  the handshake is done
        self._forget(guest)
        with contextlib.suppress(OSError):  # the peer may have left
            sockets.tune(guest.sock)
        sock = Connection.of(guest.sock)
        sock.end_handshake(guest.handshake.seals)
        serve = threading.Thread(target=self._welcomed, args=(sock, peer), name="dlj-peer", daemon=True)
        try:
            serve.start()
        except RuntimeError:  # no more threads
            sock.close()

    def _end(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.sock.close()

    def _forget(self, guest: _Guest) -> None:
        fd = guest.sock.fileno()
        del self._guests[fd]
        (self._poll if guest.proven else self._unproven).unregister(fd)
        self._crowds.remove(guest.address, fd)
        if not guest.proven and not guest.silent:
            self._begun.remove(guest.address, fd)
