"""The sidecar's Unix socket: connections that have not said yet what they want. None can hold it up."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dataloaderjob.core import ipc, sockets
from dataloaderjob.core.errors import DataLoaderJobError, InputError, RemoteProtocolError, first_line

HELLO_TIMEOUT_S = 5.0
MAX_HELLO_NBYTES = 8 * 1024 * 1024
"""An adoption that names all leases that there can be takes 3 MB."""
MAX_GUESTS = 256


@dataclass(slots=True, eq=False)
class Guest:
    """A connection until its first message is whole."""

    sock: socket.socket
    deadline: float
    incoming: ipc.Assembler = field(default_factory=lambda: ipc.Assembler(MAX_HELLO_NBYTES))
    fds: list[int] = field(default_factory=list)
    stranger: int | None = None
    """Another user, who is not heard."""

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)

    def answer(self, packets: list[bytes], fds: list[int] | None = None) -> None:
        """Sends what the socket's buffer takes at once, which is far more than any answer."""
        socket.send_fds(self.sock, [packets[0]], fds or [])
        for packet in packets[1:]:
            self.sock.send(packet)


OnMessage = Callable[[Guest, ipc.Packet], None]
"""Owns the guest from then on; raises to have it told the reason and closed."""


class TrainerListener:
    """The listening socket and its guests."""

    def __init__(
        self, path: str, select: selectors.BaseSelector, on_message: OnMessage, *, private: bool = False
    ) -> None:
        """`private`: processes of this user alone are heard. Raises InputError when nothing can listen at `path`."""
        self._private = private
        self._select, self._on_message = select, on_message
        self._guests: set[Guest] = set()
        self._path = path
        self._sock = listen(path)
        self._inode = os.stat(path).st_ino
        select.register(self._sock, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return
        if len(self._guests) >= MAX_GUESTS:
            sock.close()
            return
        sock.setblocking(False)
        guest = Guest(sock, time.monotonic() + HELLO_TIMEOUT_S)
        if self._private and (uid := sockets.peer_uid(sock)) != os.getuid():
            guest.stranger = uid
        self._guests.add(guest)
        self._select.register(sock, selectors.EVENT_READ, lambda: self._read(guest))

    def _read(self, guest: Guest) -> None:
        try:
            data, fds = ipc.recv_with_fds(guest.sock)
            guest.fds += fds
            if len(guest.fds) > ipc.MAX_FDS:
                raise RemoteProtocolError(f"more than {ipc.MAX_FDS} descriptors came with one message")
            if not data:
                raise ConnectionError("the trainer closed the connection")
            if (
                guest.stranger is not None
            ):  # only now: a socket that is closed with words unread loses our answer
                raise RemoteProtocolError(
                    f"this sidecar serves user {os.getuid()} alone, found user {guest.stranger}"
                )
            packet = guest.incoming.feed(data)
            if packet is None:
                return
            self._forget(guest)
            self._on_message(guest, packet)
        except BlockingIOError:
            return
        except Exception as exc:  # a stranger's message must not end the sidecar, whatever it holds
            self._forget(guest)
            with contextlib.suppress(OSError):
                guest.answer(ipc.pack_json(ipc.Type.REFUSED, {"error": _reason(exc)}))
            guest.close()

    def expire(self, now: float) -> None:
        """Closes guests that did not say in time what they want."""
        for guest in [g for g in self._guests if g.deadline < now]:
            self._forget(guest)
            guest.close()

    def _forget(self, guest: Guest) -> None:
        if guest in self._guests:
            self._guests.discard(guest)
            self._select.unregister(guest.sock)

    def close_in_child(self) -> None:
        """After a fork: the child has no use for the socket and the guests."""
        self._sock.close()
        for guest in self._guests:
            guest.close()

    def close(self) -> None:
        """Removes the socket, unless another sidecar's lies there by now."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        self._sock.close()


def _reason(exc: Exception) -> str:
    if isinstance(exc, DataLoaderJobError):
        return str(exc)
    return f"the message makes no sense ({first_line(exc)}): install the same dataloaderjob version on both sides"


def listen(path: str) -> socket.socket:
    """A listening socket at `path`, in place of one that a dead sidecar left. Raises InputError.

    It has that name only once it listens: whoever sees it can connect.
    """
    folder, name = os.path.split(path)
    unseen = os.path.join(folder, ("_" if name.startswith("~") else "~") + name[1:])
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    old = os.umask(0o117)
    try:
        for place in (path, unseen):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(place).st_mode):
                    raise InputError(
                        f"a socket is to be made at {place}, where something else lies: choose another path"
                    )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unseen)
        sock.bind(unseen)
        sock.listen(128)
        os.rename(unseen, path)
    except InputError:
        sock.close()
        raise
    except OSError as exc:
        sock.close()
        raise InputError(
            f"user {os.getuid()} cannot make a socket at {path} ({exc.strerror}): give it a folder that it may write to"
        ) from exc
    finally:
        os.umask(old)
    sock.setblocking(False)
    return sock
