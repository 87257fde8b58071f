"""Accepts connections and lets in those that hold the job's key.

Each handshake has a short-lived thread. A peer without the key costs at most 4 KiB and five seconds,
however slowly it sends; beyond MAX_GUESTS at once, new ones are turned away.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from dataloaderjob.core import auth, sockets

log = logging.getLogger(__name__)
MAX_GUESTS = 64

Welcomed = Callable[[socket.socket, dict[str, Any]], None]


class Acceptor:
    """A listening socket and the handshakes under way."""

    def __init__(
        self, host: str, port: int, *, key: bytes, job: str, facts: dict[str, Any], welcomed: Welcomed
    ) -> None:
        """`welcomed(socket, answer)` is called in the handshake's thread and owns the socket from then on.

        Raises OSError when the address cannot be bound.
        """
        self._key, self._job, self._facts, self._welcomed = key, job, facts, welcomed
        self._lock = threading.Lock()
        self._guests: dict[socket.socket, float] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.sock = socket.create_server((host, port), family=family, backlog=128)
        self.sock.setblocking(False)

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    def accept_all(self) -> None:
        """Takes what waits at the listening socket. Never blocks, never raises for a guest's sake."""
        while True:
            try:
                guest, _ = self.sock.accept()
            except OSError:  # nothing more, or no descriptors left: the next tick tries again
                return
            with self._lock:
                full = len(self._guests) >= MAX_GUESTS
                if not full:
                    self._guests[guest] = time.monotonic() + auth.HANDSHAKE_TIMEOUT_S
            if full:
                guest.close()
                continue
            threading.Thread(target=self._greet, args=(guest,), name="dlj-handshake", daemon=True).start()

    def expire(self) -> None:
        """Ends handshakes past their deadline. Call about once a second."""
        now = time.monotonic()
        with self._lock:
            late = [guest for guest, deadline in self._guests.items() if deadline < now]
        for guest in late:
            with contextlib.suppress(OSError):
                guest.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.sock.close()

    def _greet(self, guest: socket.socket) -> None:
        try:
            sockets.tune(guest)
            answer = sockets.welcome(guest, self._key, job=self._job, facts=self._facts)
        except ConnectionError as exc:  # a probe of the port, for one, which comes every few seconds
            log.debug("a connection ended within its handshake: %s", exc)
            guest.close()
            return
        except Exception as exc:  # whatever a stranger's bytes provoke ends the stranger only
            log.info("a connection was refused: %s", exc)
            guest.close()
            return
        finally:
            self._forget(guest)
        self._welcomed(guest, answer)

    def _forget(self, guest: socket.socket) -> None:
        with self._lock:
            self._guests.pop(guest, None)
