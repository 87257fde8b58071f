"""A receiver whose round over many slow connections takes long: it takes none of them for stuck."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dataloaderjob.core.frames import FrameKind, Header
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.sidecar import receiver as module
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.dispatch.overseer import TRANSFER_FLOOR_S
from dataloaderjob.sidecar.dispatch.streams import Endpoint
from dataloaderjob.sidecar.feeder_connection import BODY_WAIT_S
from dataloaderjob.sidecar.receiver import Receiver, TrainerGone

FEEDERS, ROUNDS, NBYTES = 150, 4, 1 << 20
BUNDLE = bytes(16)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Connection:
    """Has a part of a body whenever it is asked; to wait for more of it takes as long as it may."""

    sock, partial = True, False

    def __init__(self, number: int, receiver: Receiver, clock: Clock) -> None:
        self.endpoint = Endpoint(f"feeder-{number}", f"i{number}", "h", number)
        self._receiver, self._clock = receiver, clock

    def handshake_late(self, now: float) -> bool:
        return False

    def on_ready(self, mask: int) -> None:
        self._clock.now += BODY_WAIT_S
        connection: Any = self
        self._receiver.connection_moved(connection)


class Rounds:
    """A receiver without sockets, each of whose connections has something in each round."""

    def __init__(self, clock: Clock) -> None:
        self.closed: list[str] = []
        self.rounds = 0
        made: Any = object.__new__(Receiver)
        made.machine = Dispatcher(LoaderSettings(shared_memory_nbytes=4 * FEEDERS * NBYTES))
        made.control = SimpleNamespace(
            want=lambda starved: None, ended_leases=lambda highest: [], words=[0] * 128
        )
        made.regions, made._poll = {}, self
        made._by_fd = {n: Connection(n, made, clock) for n in range(FEEDERS)}
        made._connections = {connection.endpoint.instance: connection for connection in made._by_fd.values()}
        made._used_at, made._is_given_back, made._gives_back = 0.0, False, False
        made._dirty, made._flush, made._do = set(), lambda: None, self._note
        made._send_to_parent = lambda: None
        self.receiver = made
        self._begin_bodies()

    def _begin_bodies(self) -> None:
        machine = self.receiver.machine
        machine.set_feeders(0.0, [connection.endpoint for connection in self.receiver._by_fd.values()])
        machine.open_stream(1, manifest=b"{}", bundle=BUNDLE, facts={}, window=FEEDERS)
        for instance in self.receiver._connections:
            machine.feeder_up(0.0, instance, {})
        machine.tickets(0.0, 1, [(n, b"") for n in range(FEEDERS)], 0)
        for feeder in machine.feeders.values():
            for stream, ticket in list(feeder.attempts):
                header = Header(FrameKind.ANNOUNCE, 0, 0, stream, ticket, BUNDLE, 0, NBYTES)
                machine.frame(0.0, feeder.endpoint.instance, header, b"")
        machine.take()

    def _note(self, now: float, item: Any) -> None:
        if type(item).__name__ == "Close":
            self.closed.append(item.reason)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self.rounds += 1
        if self.rounds > ROUNDS:
            raise TrainerGone
        return [(number, 1) for number in range(FEEDERS)]


def test_long_round_of_a_receiver_closes_no_connection(
    monkeypatch: pytest.MonkeyPatch,
):
    clock = Clock()
    rounds = Rounds(clock)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module.metrics, "store", lambda control, machine: None)
    rounds.receiver.run()
    assert clock.now >= 1.5 * ROUNDS * TRANSFER_FLOOR_S
    assert rounds.closed == []
