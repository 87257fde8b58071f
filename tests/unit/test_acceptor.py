"""The port of feeders and supervisor, under peers that do not hold the key."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flood import flooded, target

from dataloaderjob.core import acceptor
from dataloaderjob.core.acceptor import MAX_GUESTS, Acceptor
from dataloaderjob.core.handshake import greet
from dataloaderjob.core.sockets import Connection

KEY, JOB = bytes(range(32)), "job"


class Served:
    """An acceptor with its loop, as feeder and supervisor run it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.welcomed: list[dict[str, Any]] = []
        self.host = host
        self.acceptor = Acceptor(host, 0, key=KEY, job=JOB, facts={"is": "here"}, welcomed=self._welcomed)
        self.turns = 0
        self._stop = False
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _welcomed(self, sock: socket.socket, answer: dict[str, Any]) -> None:
        self.welcomed.append(answer)
        sock.close()

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self.acceptor, select.POLLIN)
        while not self._stop:
            poll.poll(100)
            self.turns += 1
            self.acceptor.serve()
            self.acceptor.expire()

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self.acceptor.close()

    def connect(self) -> Connection:
        port = 0 if self.host.startswith("\0") else self.acceptor.port
        family, address = target(self.host, port)
        sock = Connection(family)
        sock.settimeout(5)
        sock.connect(address)
        return sock

    def let_in(self, within_s: float = 2.0) -> bool:
        """True if somebody with the key is let in within this time, trying again as peers do."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):  # an abstract socket whose queue is full
                if greets(self.connect()):
                    return True
            time.sleep(0.01)
        return False


def greets(sock: Connection) -> bool:
    with sock, contextlib.suppress(OSError):
        return greet(sock, KEY, role="receiver", name="r", job=JOB)["is"] == "here"
    return False


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def test_peers_without_the_key_holding_all_places_block_nobody(served: Served):
    held = [served.connect() for _ in range(2 * MAX_GUESTS)]
    try:
        assert served.let_in()
    finally:
        for sock in held:
            sock.close()


def test_peers_retaking_all_places_at_once_block_nobody(served: Served):
    stop = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                held.append(served.connect())
            if len(held) > 2 * MAX_GUESTS:
                held.pop(0).close()
            time.sleep(0.001)
        for sock in held:
            sock.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        time.sleep(0.5)
        assert all(served.let_in() for _ in range(5))
    finally:
        stop.set()
        thread.join()


def test_two_hundred_peers_with_the_key_at_once_all_get_in(served: Served):
    came = [served.connect() for _ in range(200)]
    for sock in came:  # each has a place before the first one answers
        sock.recv(1, socket.MSG_PEEK)
    assert all(greets(sock) for sock in came)


def test_oldest_guest_of_the_address_with_most_guests_gives_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptor, "MAX_GUESTS", 8)
    with contextlib.ExitStack() as stack:
        served = Served("0.0.0.0")
        stack.callback(served.close)

        def connect(source: str) -> Connection:
            address = "127.0.0.1", served.acceptor.port
            made = Connection.of(socket.create_connection(address, timeout=5, source_address=(source, 0)))
            made.settimeout(5)
            return stack.enter_context(made)

        honest = connect("127.0.0.2")
        honest.recv(1, socket.MSG_PEEK)  # it is a guest from here on
        crowd = [connect("127.0.0.3") for _ in range(50)]
        crowd[-1].recv(1, socket.MSG_PEEK)
        assert crowd[0].recv(4096), "the first message"
        assert crowd[0].recv(4096) == b"", "it gave way"
        assert greets(honest)


def honest_peers(served: Served) -> int:
    """Lets 40 peers with the key connect at once; returns how many are let in within 5 s."""
    with ThreadPoolExecutor(40) as pool:
        return sum(pool.map(lambda _: served.let_in(5.0), range(40)))


PLACES = ["127.0.0.1", "\0dataloaderjob-test-flood"]


@pytest.mark.parametrize("held", [1, 600, 3000], ids=lambda held: f"held-{held}")
@pytest.mark.parametrize("host", PLACES, ids=["tcp", "abstract"])
@pytest.mark.quick("tcp-held-3000", "abstract-held-600", others="nightly")
def test_forty_peers_get_in_through_4000_connections_a_second(host: str, held: int):
    served = Served(host)
    try:
        port = 0 if host.startswith("\0") else served.acceptor.port
        with flooded(host, port, held=held):
            assert honest_peers(served) == 40
    finally:
        served.close()


@pytest.mark.nightly
def test_a_long_flood_delays_no_peer_beyond_five_seconds():
    served = Served()
    try:
        with flooded("127.0.0.1", served.acceptor.port):
            end = time.monotonic() + 60
            while time.monotonic() < end:
                assert honest_peers(served) == 40
    finally:
        served.close()


def test_acceptor_without_descriptors_does_not_spin(served: Served):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mine = [served.connect() for _ in range(4)]
    waiting = [socket.socket() for _ in range(8)]
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(socket.socket())
                if len(taken) == 1:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0].fileno() + 16, hard))
        turns = served.turns
        for sock in waiting:
            sock.settimeout(2)
            sock.connect(("127.0.0.1", served.acceptor.port))
        time.sleep(1.0)
        assert served.turns - turns < 100
        for sock in waiting:
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b"", "it was accepted and closed"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for sock in [*mine, *waiting, *taken]:
            sock.close()
    assert served.let_in()


def test_unauthenticated_peers_get_a_quarter_of_scarce_descriptors(monkeypatch: pytest.MonkeyPatch):
    # Told, not set: the process of the tests may have more than 96 open.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 * 24, 4 * 24))
    with contextlib.ExitStack() as stack:
        served = Served()
        stack.callback(served.close)
        for _ in range(2 * MAX_GUESTS):
            stack.enter_context(served.connect())
        assert served.let_in()
        assert len(served.acceptor._guests) <= 24


def test_refused_peers_are_logged_in_one_line(served: Served, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    for _ in range(20):
        with served.connect() as sock, contextlib.suppress(OSError):
            sock.sendall(b"\xff" * 64)
            sock.recv(4096)
            sock.recv(4096)

    def told() -> list[str]:
        """What the acceptor has logged; threads of earlier tests log, too."""
        return [record.getMessage() for record in caplog.records if record.name == acceptor.__name__]

    deadline = time.monotonic() + 3
    while not told() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    (line,) = told()
    assert "connections were refused" in line


def test_port_probe_is_not_logged_as_a_refusal(served: Served, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    turns = served.turns
    for _ in range(5):
        served.connect().close()
    while served.turns < turns + 10:
        time.sleep(0.05)
    assert [record for record in caplog.records if record.name == acceptor.__name__] == []
