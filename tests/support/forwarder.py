"""A way to a port of this machine that can be cut, as a network can."""

from __future__ import annotations

import contextlib
import socket
import threading

from ports import reserve_port

PIECE_NBYTES = 1 << 16


class Forwarder:
    """Hands connections on to `target` until it is cut, and again after it is mended."""

    def __init__(self, target: int) -> None:
        self.port = reserve_port()
        self._target, self._open, self._lock = target, list[socket.socket](), threading.Lock()
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Ends all connections, and refuses others."""
        with self._lock:
            for sock in (self._listener, *self._open):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                with self._lock:
                    if listener.fileno() < 0:  # cut meanwhile
                        return near.close()
                    far = socket.create_connection(("127.0.0.1", self._target))
                    self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=(source, target), daemon=True).start()


def copy(source: socket.socket, target: socket.socket) -> None:
    """Carries bytes in one direction until they end."""
    with contextlib.suppress(OSError):
        while data := source.recv(PIECE_NBYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
