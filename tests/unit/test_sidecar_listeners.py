"""The sidecar's port for probes and metrics, under clients that hold, trickle and flood."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from flood import flooded

from dataloaderjob.sidecar.listeners import CLIENT_TIMEOUT_S, MAX_CLIENTS, HttpServer

REQUEST = b"GET /healthz HTTP/1.0\r\n\r\n"


class Served:
    """The port with its loop, as the sidecar runs it."""

    def __init__(self) -> None:
        self._select = selectors.DefaultSelector()
        self.http = HttpServer("0.0.0.0", 0, lambda path: (200, "text/plain", "ok\n"), self._select)
        self._stop = False
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop:
            for key, _ in self._select.select(0.1):
                key.data()
            self.http.expire(time.monotonic())

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self.http.close_in_child()
        self._select.close()

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.http.port), 5, source_address=(source, 0))

    def answers(self, attempts: int = 3) -> bool:
        """True if a probe is answered, which a kubelet tries three times."""
        for _ in range(attempts):
            with contextlib.suppress(OSError), self.connect("127.0.0.9") as sock:
                sock.sendall(REQUEST)
                if sock.recv(4096).startswith(b"HTTP/1.0 200"):
                    return True
        return False


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def ended(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return sock.recv(1) == b""
    return True


def test_clients_that_send_nothing_or_little_are_closed(served: Served) -> None:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        idle, trickling = (stack.enter_context(served.connect()) for _ in range(2))
        trickling.sendall(REQUEST[:5])
        assert ended(idle)
        assert ended(trickling)
    assert time.monotonic() - began < CLIENT_TIMEOUT_S + 2


def test_client_of_a_quiet_address_keeps_its_place_among_many(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(served.connect("127.0.0.9"))
        many = [stack.enter_context(served.connect()) for _ in range(MAX_CLIENTS + 20)]
        assert ended(many[0]), "the oldest of the others gave way"
        probe.sendall(REQUEST)
        assert probe.recv(4096).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize("held", [1, 600], ids=lambda held: f"held-{held}")
def test_probes_are_answered_through_4000_connections_a_second(served: Served, held: int) -> None:
    with flooded("127.0.0.1", served.http.port, held=held), ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: served.answers(), range(40)))
