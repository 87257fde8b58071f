"""Links that break, and feeders that do not fit: what counts as a death, and what people hear."""

from __future__ import annotations

import json
from typing import Any

from dataloaderjob.core.frames import FrameKind, Header
from dataloaderjob.core.settings import LoaderSettings
from dataloaderjob.sidecar.dispatch import overseer
from dataloaderjob.sidecar.dispatch.choose import MISFIT_GRACE_S
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.dispatch.instructions import Fail, Note, Replace
from dataloaderjob.sidecar.dispatch.streams import Endpoint

ENDPOINTS = [Endpoint(f"feeder-{n}", f"i{n}", "h", n) for n in range(4)]


def rank(feeders: int = 4, **facts: Any) -> Dispatcher:
    machine = Dispatcher(LoaderSettings())
    machine.set_feeders(0.0, ENDPOINTS[:feeders])
    machine.open_stream(1, manifest=b"{}", bundle=bytes(16), facts=facts, window=4)
    return machine


def failed(machine: Dispatcher) -> list[str]:
    return [json.loads(item.payload)["message"] for item in machine.take() if isinstance(item, Fail)]


def makes(machine: Dispatcher, instance: str, ticket: int = 0) -> None:
    """The feeder says that it makes the third sample."""
    header = Header(FrameKind.PROGRESS, 0, 0, 1, ticket, bytes(16), 0, 3)
    machine.frame(0.0, instance, header, b"")


def where(machine: Dispatcher, ticket: int = 0) -> str:
    (attempt,) = machine.streams[1].tickets[ticket].attempts
    return attempt.feeder.endpoint.instance


def after_three_broke() -> Dispatcher:
    """Three of four feeders were making a sample of one ticket when their connections broke, one after the other."""
    machine = rank()
    for endpoint in ENDPOINTS:
        machine.feeder_up(0.0, endpoint.instance, {})
    machine.tickets(0.0, 1, [(0, b"")], 0)
    for at in range(3):
        instance = where(machine)
        makes(machine, instance)
        machine.feeder_down(at, instance, "reset")
    return machine


def test_links_that_break_and_recover_are_not_deaths() -> None:
    machine = rank(1)
    machine.feeder_up(0.0, "i0", {})
    machine.tickets(0.0, 1, [(0, b"")], 0)
    for at in range(1, 8):
        makes(machine, where(machine))
        machine.feeder_down(at, "i0", "feeder-0: reset")
        machine.feeder_up(at + 0.5, "i0", {})
    assert failed(machine) == []
    assert machine.streams[1].tickets[0].unconfirmed == 0


def test_feeders_that_died_making_a_ticket_count_once_unlisted() -> None:
    machine = rank()
    for endpoint in ENDPOINTS:
        machine.feeder_up(0.0, endpoint.instance, {})
    machine.tickets(0.0, 1, [(0, b"")], 0)
    left = {endpoint.instance: endpoint for endpoint in ENDPOINTS}
    for at in range(3):
        instance = where(machine)
        makes(machine, instance)
        machine.feeder_down(at, instance, f"{instance} ended")
        assert failed(machine) == []
        del left[instance]
        machine.set_feeders(at + 0.1, list(left.values()))
    assert failed(machine) == [], "whether memory ran out there is not known yet"
    assert machine.streams[1].tickets[0].attempts == [], "and no fourth one is asked"
    overseer.tick(machine, 2.1 + overseer.LAST_WORDS_S)
    (message,) = failed(machine)
    assert "3 feeder processes died" in message
    assert set(machine.feeders) == set(left), "those that died are forgotten then"


def test_no_fourth_feeder_is_asked_while_three_may_have_died_of_a_ticket() -> None:
    machine = after_three_broke()
    assert machine.streams[1].tickets[0].attempts == []
    overseer.tick(machine, 5.0)
    assert failed(machine) == []
    overseer.tick(machine, 2.0 + overseer.STRIKE_AFTER_S + 0.1)
    assert len(failed(machine)) == 1, "they have not come back"


def test_strikes_of_a_closed_stream_have_no_effect() -> None:
    machine = after_three_broke()
    machine.close_stream(3.0, 1, 0)
    overseer.tick(machine, 60.0)
    assert failed(machine) == []


def test_feeder_of_another_image_fails_nothing_while_others_connect() -> None:
    machine = rank(2, python="3.11")
    machine.tickets(0.0, 1, [(0, b"")], 0)
    machine.feeder_up(0.0, "i0", {"python": "3.12"})
    overseer.tick(machine, MISFIT_GRACE_S - 1)
    assert failed(machine) == []
    machine.feeder_up(MISFIT_GRACE_S - 0.5, "i1", {"python": "3.11"})
    assert where(machine) == "i1"


def test_feeders_that_all_have_another_image_fail_after_a_grace_period() -> None:
    machine = rank(2, python="3.11")
    machine.tickets(0.0, 1, [(0, b"")], 0)
    machine.feeder_up(0.0, "i0", {"python": "3.12"})
    overseer.tick(machine, 0.1)
    overseer.tick(machine, MISFIT_GRACE_S + 1)
    (message,) = failed(machine)
    assert "the trainer has Python 3.11, but the feeder has 3.12" in message


def test_reason_for_no_connection_is_reported_within_five_seconds() -> None:
    machine = rank(2)
    machine.tickets(0.0, 1, [(0, b"")], 0)
    for endpoint in ENDPOINTS[:2]:
        machine.feeder_down(0.5, endpoint.instance, f"{endpoint.name}: the peer refused: it has another key")
    overseer.tick(machine, overseer.UNCONNECTED_NOTE_S - 0.1)
    assert not [item for item in machine.take() if isinstance(item, Note)]
    overseer.tick(machine, overseer.UNCONNECTED_NOTE_S + 0.1)
    (note,) = [item.text for item in machine.take() if isinstance(item, Note)]
    assert (
        "no feeder is connected; the supervisor lists 2 feeders (feeder-0: the peer refused: it has another key"
        in note
    )
    overseer.tick(machine, 8.0)
    assert not [item for item in machine.take() if isinstance(item, Note)], "once in a while"


def test_waiting_for_space_does_not_count_as_slowness() -> None:
    machine = Dispatcher(LoaderSettings(shared_memory_nbytes=1 << 20, pool_nbytes=8192))
    machine.set_feeders(0.0, ENDPOINTS[:1])
    machine.open_stream(1, manifest=b"{}", bundle=bytes(16), facts={}, window=4)
    machine.feeder_up(0.0, "i0", {})
    machine.tickets(0.0, 1, [(n, b"") for n in range(2)], 0)
    announce = Header(FrameKind.ANNOUNCE, 0, 0, 1, 0, bytes(16), 0, 4096)
    machine.frame(0.05, "i0", announce, b"")
    body = announce._replace(kind=FrameKind.BODY, nbytes=4096, room=0)
    machine.begin_body(5.0, "i0", body)
    machine.end_body(5.0, "i0", body)
    assert machine.streams[1].pace.typical == 0.05


def test_unreachable_feeder_is_reported_repeatedly() -> None:
    machine = rank(1)
    machine.feeder_down(0.0, "i0", "refused")
    told = []
    for at in range(0, 70, 5):
        overseer.tick(machine, float(at))
        told += [(at, item.connected) for item in machine.take() if isinstance(item, Replace)]
    assert told == [(25, False), (45, False), (65, False)]
