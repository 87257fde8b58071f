"""Ports that a run chooses before those who listen there are up."""

from __future__ import annotations

import socket

import pytest

from dataloaderjob.core.sockets import listen
from dataloaderjob.local import ports
from dataloaderjob.local.ports import RAYS_AGENT, ReservedPort


@pytest.fixture
def port():
    made = ReservedPort()
    yield made
    made.close()


def test_reserved_port_is_unavailable_to_other_processes(port: ReservedPort) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port.number))


def test_supervisor_and_its_successor_listen_at_a_reserved_port(port: ReservedPort) -> None:
    for _ in range(3):
        with (
            listen("127.0.0.1", port.number) as server,
            socket.create_connection(("127.0.0.1", port.number)) as client,
        ):
            accepted, _address = server.accept()
            accepted.close()
            assert client.recv(1) == b"", "the server's end is closed first, which keeps the port for a while"


def test_released_port_can_be_bound(port: ReservedPort) -> None:
    port.close()
    port.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port.number))


def test_rays_default_agent_port_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Chosen(socket.socket):
        def getsockname(self):
            if not given or given[0] is self:
                given.append(self)
                return ("127.0.0.1", RAYS_AGENT)
            return super().getsockname()

    monkeypatch.setattr(ports.socket, "socket", Chosen)
    port = ReservedPort()
    assert port.number != RAYS_AGENT
    assert given[0].fileno() == -1, "closed"
    port.close()
