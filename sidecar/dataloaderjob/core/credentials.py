"""The certificates of a process, for TLS (`core.tls`).

Each process has a folder with a subfolder for each generation of certificates: `0`, `1`, and so on. The process uses
the newest generation for new connections. A generation has three files. `tls.crt` and `tls.key` belong to this process.
`ca.crt` contains the authorities that it trusts, including those of the previous and next generations. The operator
creates the files. On one machine, the run creates them (`local.certificates`).
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.generations import FILES
from dataloaderjob.core.keys import Part
from dataloaderjob.core.opening import Prove
from dataloaderjob.core.tls import FIELD, TlsConnection, new_context

_CREATED = "the operator, or `dataloaderjob run`, creates them; see its log"

LOOK_EVERY_S = 1.0
"""Minimum number of seconds between two checks of the folder."""


def newest(names: Iterable[str]) -> int | None:
    """Returns the newest generation among these folder names, or None if there is none."""
    return max((int(name) for name in names if name.isascii() and name.isdecimal()), default=None)


class Credentials:
    """The certificates of this process. Threads may share them."""

    def __init__(self, folder: str | Path) -> None:
        """Raises InputError if the folder has no usable certificates."""
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._loaded: tuple[int, int] | None = None
        self._look_at = 0.0
        self._server, self._client = self._load()

    @property
    def generation(self) -> int:
        """The generation that the next connection uses."""
        self._refresh()
        assert self._loaded is not None  # noqa: S101  the constructor has loaded one
        return self._loaded[0]

    def accepted(self, sock: socket.socket) -> TlsConnection:
        """Returns a TLS connection over an accepted socket, and takes ownership of the socket."""
        self._refresh()
        return TlsConnection.over(sock, self._server, None)

    def connected(self, sock: socket.socket, to: Part, prove: Prove | None = None) -> TlsConnection:
        """Returns a TLS connection over a socket, and takes ownership of it. The socket is connected to the part `to`
        of the job. `prove` answers the peer's challenge."""
        self._refresh()
        return TlsConnection.over(sock, self._client, to.host, prove)

    def _refresh(self) -> None:
        """Loads a generation that was added or changed. Keeps the current one if that fails."""
        with self._lock:
            if (now := time.monotonic()) < self._look_at:
                return
            self._look_at = now + LOOK_EVERY_S
            try:
                if self._found() != self._loaded:
                    self._server, self._client = self._load()
            except (OSError, InputError):
                return

    def _found(self) -> tuple[int, int]:
        generation = newest(path.name for path in self._folder.iterdir())
        if generation is None:
            raise InputError(f"{FIELD} is true, but {self._folder} has no certificates: {_CREATED}")
        changed = max((self._folder / str(generation) / name).stat().st_mtime_ns for name in FILES)
        return generation, changed

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        try:
            loaded = self._found()
            paths = [self._folder / str(loaded[0]) / name for name in FILES]
            made = [
                _context(protocol, paths) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
            ]
        except OSError as exc:  # ssl.SSLError is one
            raise InputError(
                f"{FIELD} is true, but the certificates in {self._folder} cannot be read ({exc}): {_CREATED}"
            ) from exc
        self._loaded = loaded
        return made[0], made[1]


def _context(protocol: ssl._SSLMethod, paths: Sequence[Path]) -> ssl.SSLContext:
    authorities, certificate, key = paths
    made = new_context(protocol)
    made.load_verify_locations(authorities)
    made.load_cert_chain(certificate, key)
    return made
