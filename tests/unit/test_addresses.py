"""Addresses of IPv6 and IPv4: who listens everywhere is found by both, and texts can be read back."""

from __future__ import annotations

import selectors
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from feeder_client import wait_until
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core import handshake, sockets, supervision
from dataloaderjob.core.acceptor import Acceptor
from dataloaderjob.core.errors import InputError, RemoteProtocolError, ServiceError
from dataloaderjob.core.sockets import EVERYWHERE, address_text, listen, parse_address
from dataloaderjob.pod import feeder
from dataloaderjob.sidecar.dispatch.streams import Endpoint
from dataloaderjob.sidecar.feeder_connection import BodyPhase, FeederConnection
from dataloaderjob.sidecar.listeners import HttpServer

KEY = bytes(range(32))
LOOPBACKS = ("::1", "127.0.0.1")
NO_IPV6 = not socket.has_dualstack_ipv6()
needs_ipv6 = pytest.mark.skipif(NO_IPV6, reason="this machine has no IPv6")


@needs_ipv6
@pytest.mark.parametrize("address", LOOPBACKS)
def test_wildcard_listener_is_reachable_over_ipv6_and_ipv4(address: str):
    with listen(EVERYWHERE, 0) as sock, socket.create_connection((address, sock.getsockname()[1]), timeout=5):
        sock.accept()[0].close()


def test_without_ipv6_the_wildcard_address_covers_ipv4(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen(EVERYWHERE, 0) as sock:
        assert sock.family is socket.AF_INET
        assert sock.getsockname()[0] == "0.0.0.0"


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    """It is told of its guests, and closes them."""
    made = Acceptor(
        EVERYWHERE, 0, key=KEY, job="job", facts={"instance": "i0"}, welcomed=lambda s, _: s.close(),
        versions=handshake.DATA,
    )  # fmt: skip
    done = threading.Event()

    def accept() -> None:
        while not done.wait(0.01):
            made.serve()

    thread = threading.Thread(target=accept)
    thread.start()
    yield made
    done.set()
    thread.join()
    made.close()


@needs_ipv6
@pytest.mark.parametrize("address", LOOPBACKS)
def test_handshake_works_over_ipv6_and_ipv4(acceptor: Acceptor, address: str):
    with sockets.dial((address, acceptor.port), 5) as sock:
        sockets.tune(sock)
        found = handshake.greet(sock, KEY, role="receiver", name="f", job="job", versions=handshake.DATA)
        assert found == {"instance": "i0"}


@needs_ipv6
@pytest.mark.parametrize("address", LOOPBACKS)
def test_receiver_connects_to_a_feeder_over_ipv6_and_ipv4(acceptor: Acceptor, address: str):
    endpoint = Endpoint("feeder-0", "i0", address, acceptor.port)
    connection = FeederConnection(endpoint, Sink(), key=KEY, job="job", name="r")
    wait_until(lambda: connected(connection), 10, f"a feeder at {address_text(address, acceptor.port)}")
    connection.close()


class Sink:
    def connection_up(self, connection, facts) -> None: ...
    def connection_moved(self, connection) -> None: ...


def connected(connection: FeederConnection) -> bool:
    """One step of a connection that is made, or made again."""
    if connection.sock is None:
        connection.connect(time.monotonic())
    assert connection.sock is not None
    with selectors.DefaultSelector() as ready:
        ready.register(connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        ready.select(0.5)
    try:
        connection.on_ready(connection.interest)
    except BlockingIOError:
        pass
    except OSError:
        connection.give_up(time.monotonic())
    return connection.phase is BodyPhase.UP


@needs_ipv6
@pytest.mark.parametrize("address", LOOPBACKS)
def test_probes_and_metrics_answer_over_ipv6_and_ipv4(address: str):
    with selectors.DefaultSelector() as ready:
        server = HttpServer(EVERYWHERE, 0, lambda _: (200, "text/plain", "well\n"), ready)
        answers: list[bytes] = []
        url = f"http://{address_text(address, server.port)}/healthz"
        thread = threading.Thread(
            target=lambda: answers.append(urllib.request.urlopen(url, timeout=5).read())
        )
        thread.start()
        while thread.is_alive():
            for key, _ in ready.select(0.05):
                key.data()
        server.close_in_child()
    assert answers == [b"well\n"]


@needs_ipv6
def test_messages_show_ipv6_addresses_in_brackets():
    with listen("::1", 0) as taken, selectors.DefaultSelector() as ready:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"cannot serve metrics at \[::1\]:{port} "):
            HttpServer("::1", port, lambda _: (200, "text/plain", ""), ready)
    gone = feeder.StillThere(("::1", port))
    with pytest.raises(ServiceError, match=rf"GCS at \[::1\]:{port} disappeared"):
        for _ in range(feeder.GONE_AFTER):
            gone._due = 0.0
            gone()


@given(
    st.one_of(st.ip_addresses().map(str), st.sampled_from(["mnist-head", "a.b.svc"])), st.integers(1, 65535)
)
def test_address_round_trips_through_its_text(address: str, port: int):
    assert parse_address(address_text(address, port)) == (address, port)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "fd00::7:6379", "[]:1"]
)
def test_invalid_address_is_refused(text: str):
    with pytest.raises(ValueError, match="must have the form host:port"):
        parse_address(text)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("10.0.0.7", "192.168.4.4"),
        ("10.0.0.7", "fd00::7"),
        ("fe80::1%eth0", "fe80::2"),
    ],
)
def test_feeder_reports_an_address_that_may_be_its_own(peer: str, host: str) -> None:
    """It may have several networks, or be behind one that translates addresses."""
    assert supervision.host_of({"type": "ready", "host": host}, peer) == host


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "fe80::1", "0.0.0.0", "::", "224.0.0.1", "ff02::1"],
)  # fmt: skip
def test_feeder_cannot_report_an_address_that_means_its_peers_machine(host: str) -> None:
    """Sidecars would connect to themselves, or to a service of their own node."""
    with pytest.raises(RemoteProtocolError, match=f"connected from 10.0.0.7, reports {host}$"):
        supervision.host_of({"type": "ready", "host": host}, "10.0.0.7")


@pytest.mark.parametrize(
    "host", ["", "metadata.google.internal", "10.0.0", "10.0.0.7:25", 7, None, "1" * 300]
)
def test_feeders_host_that_is_no_address_is_refused(host: object) -> None:
    """A name would be looked up by each sidecar, which waits for the answer."""
    with pytest.raises(RemoteProtocolError):
        supervision.host_of({"type": "ready", "host": host}, "10.0.0.7")
