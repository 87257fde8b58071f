"""Somebody on the path alters, drops, repeats, reorders or splices in frames: the connection ends with the reason, and
what was done over it is done again over the next."""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import Numbers
from patience import PATIENCE_S
from ports import reserve_port
from rig import until
from supervisor_alone import SupervisorAlone
from tamperer import Change, Deed, TamperedRig, Tamperer, altered, dropped, repeated, spliced, swapped

from dataloaderjob import DataLoader
from dataloaderjob.core import handshake, keys, sockets, supervision
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.core.errors import ProtocolError
from dataloaderjob.core.frames import PROTOCOL
from dataloaderjob.core.keys import Holder
from dataloaderjob.core.seals import BrokenSeal
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.feeder.connections import Registration
from dataloaderjob.sidecar.supervisor_client import SupervisorClient

ALTERED = "was altered in transit"
DROPPED = "frames were dropped or reordered in transit"
TICKET_AT, NBYTES_AT = 12, 38
"""Places in a frame's header; a change at the second adds 64 KiB."""
DEEDS: dict[str, tuple[Deed, str]] = {
    "altered-ticket": (altered(TICKET_AT), ALTERED),
    "altered-length": (altered(NBYTES_AT), ALTERED),
    "altered-mac": (altered(65 + 8), ALTERED),
    "dropped": (dropped, DROPPED),
    "repeated": (repeated, "was replayed in transit"),
    "swapped": (swapped, DROPPED),
    "spliced": (spliced, "or was sent on another connection"),
}
BATCH = 4


@pytest.fixture(scope="module")
def rig() -> Iterator[TamperedRig]:
    with TamperedRig() as made:
        yield made


class Batches:
    """Those of a loader, each of which is what it should be."""

    def __init__(self) -> None:
        self._batches = iter(DataLoader(Numbers(1_000_000), batch_size=BATCH))
        self._first = itertools.count(0, BATCH)

    def take(self, count: int) -> None:
        for first in itertools.islice(self._first, count):
            numbers, floats = next(self._batches)
            assert numbers.tolist() == list(range(first, first + BATCH))
            assert floats[:, 0].tolist() == numbers.tolist()

    def take_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, what
            self.take(1)


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["receiver", "feeder"])
@pytest.mark.parametrize("deed", DEEDS)
def test_tampered_frame_ends_its_connection_and_changes_no_batch(
    rig: TamperedRig, deed: str, by: str
) -> None:
    do, text = DEEDS[deed]
    log = rig.home / ("feeder-0.log" if by == "receiver" else "sidecar.log")
    before, batches = log.read_text().count(text), Batches()
    batches.take(20)
    rig.tamperer.arm(do, to_acceptor=by == "receiver")
    batches.take_until(lambda: log.read_text().count(text) > before, rig.logs())
    batches.take(50)


def test_altered_payload_of_a_ticket_makes_no_other_batch(rig: TamperedRig) -> None:
    log, batches = rig.home / "feeder-0.log", Batches()
    batches.take(20)
    rig.tamperer.arm(altered(-20))  # the last key, before the MAC
    batches.take_until(lambda: f"the payload of frame 4 {ALTERED}" in log.read_text(), rig.logs())
    batches.take(50)


CHANGES: dict[str, tuple[str, Change, str]] = {
    "feeders-version": (
        "challenge",
        lambda m: {**m, "protocol": PROTOCOL - 1, "oldest": PROTOCOL - 1},
        f"speaks protocol version {PROTOCOL}, which was altered to {PROTOCOL - 1} in transit",
    ),
    "receivers-version": (
        "answer",
        lambda m: {**m, "protocol": PROTOCOL - 1},
        f"the peer must speak protocol version {PROTOCOL}, but speaks {PROTOCOL - 1}",
    ),
    "role": ("answer", lambda m: {**m, "role": "blob"}, "for role 'blob', or its answer was altered in transit"),
    "trainer": (
        "answer", lambda m: {**m, "facts": {"trainer": "another"}}, "'receiver', or its answer was altered in transit",
    ),
    "facts": ("last", lambda m: {**m, "facts": {}}, "job's key, or its message was altered in transit"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_tampered_handshake_ends_its_connection_with_the_reason(rig: TamperedRig, what: str) -> None:
    message, change, text = CHANGES[what]
    log, batches = rig.home / "sidecar.log", Batches()
    batches.take(20)
    rig.tamperer.arm(**{message: change})
    batches.take_until(lambda: text in log.read_text(), rig.logs())
    batches.take(50)


# The supervisor

KEY, JOB = b"k" * handshake.KEY_NBYTES, "team/mnist/u-1"
LENGTH_AT = 2
MESSAGES: dict[str, tuple[Deed, str]] = {
    "altered-length": (altered(LENGTH_AT), ALTERED),
    "altered-text": (altered(-20), ALTERED),
    **{name: DEEDS[name] for name in ("dropped", "repeated", "swapped", "spliced")},
}


@pytest.fixture(scope="module")
def supervisor(tmp_path_factory: pytest.TempPathFactory) -> SupervisorAlone:
    folder = tmp_path_factory.mktemp("supervisor")
    return SupervisorAlone(folder, job=JOB, key=KEY, host="127.0.0.1", port=reserve_port(), feeders=100)


@pytest.fixture
def relay(supervisor: SupervisorAlone) -> Iterator[Tamperer]:
    made = Tamperer(supervisor.address, carries_frames=False)
    yield made
    made.close()


class Sidecar:
    """A sidecar's client, driven as its parent does it."""

    def __init__(self, address: tuple[str, int], folder: Path) -> None:
        own = keys.derive(KEY, Holder.SIDECAR)
        store = BlobStore(folder / "blobs")
        self.client = SupervisorClient(address, key=own, job=JOB, name="sidecar-0", store=store)
        self._taken = 0

    def turn(self) -> None:
        """Reports once, and reads what there is."""
        self.client.try_connect(time.monotonic())
        self._taken += 1
        metrics = {"next_calls": self._taken}
        self.client.send({"type": "metrics", "metrics": metrics, "receivers": 1, "failures": []})
        time.sleep(0.01)
        if self.client.fileno is not None:
            self.client.on_readable(time.monotonic())


@pytest.mark.parametrize("by", ["sidecar", "supervisor"])
@pytest.mark.parametrize("deed", MESSAGES)
def test_tampered_message_ends_its_connection_and_changes_no_report(
    supervisor: SupervisorAlone, relay: Tamperer, tmp_path: Path, deed: str, by: str,
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    do, text = MESSAGES[deed]
    sidecar, numbers, said = Sidecar(relay.address, tmp_path), itertools.count(), ""

    def turn() -> None:
        nonlocal said
        supervisor.ready(next(numbers) % 50)
        sidecar.turn()
        said += capfd.readouterr().err

    def ended() -> bool:
        turn()
        return text in (caplog.text if by == "sidecar" else said)

    def knows(feeder: int) -> bool:
        turn()
        return f"i{feeder}" in {endpoint.instance for endpoint in sidecar.client.feeders}

    for _ in range(10):
        turn()
    relay.arm(do, to_acceptor=by == "sidecar")
    until(ended, what=text)
    supervisor.ready(99)
    until(lambda: knows(99), what="a list over another connection")
    supervisor.leaves(99)
    until(lambda: not knows(99), what="a later list")
    assert (by == "supervisor") != ("closed the connection of sidecar-0" in caplog.text)


@pytest.mark.parametrize("deed", ["altered-text", "dropped"])
def test_tampered_report_of_a_feeder_ends_its_connection_and_is_repeated(
    supervisor: SupervisorAlone, relay: Tamperer, tmp_path: Path, deed: str, caplog: pytest.LogCaptureFixture
) -> None:
    do, text = MESSAGES[deed]
    caplog.set_level(logging.INFO)
    (tmp_path / "key").write_bytes(keys.derive(KEY, Holder.FEEDER))
    settings = FeederSettings(
        job=JOB, key_path=str(tmp_path / "key"), blob_folder=str(tmp_path), name="feeder-7",
        own_key=keys.of_feeder(KEY, "feeder-7").hex(),
        supervisor_host=relay.address[0], supervisor_port=relay.address[1],
    )  # fmt: skip
    relay.arm(do)
    registration = Registration(
        settings, host="127.0.0.1", port=7, instance="i7", link_key=handshake.new_key(), idle=lambda: True
    )
    registration.start()
    built = itertools.count(1)

    def told() -> bool:
        registration.tell_costs({"built": next(built), "sending": 0})
        time.sleep(0.02)
        return text in caplog.text

    until(told, what=text)
    assert "closed the connection of feeder-7" in caplog.text
    until(lambda: caplog.text.count("feeder-7 (i7) has reported") > 1, what="another report")


def test_feeder_that_reconnected_is_not_lost_with_its_old_connection(
    supervisor: SupervisorAlone, caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor notices the end of the old connection last, as after a cable was pulled."""
    ready = {
        "type": "ready",
        "host": "127.0.0.1",
        "port": 7,
        "instance": "i7",
        "pid": 7,
        "node": "",
        "session": "",
    }

    caplog.set_level(logging.INFO)

    def reports() -> sockets.Connection:
        before = caplog.text.count("feeder-7 (i7) has reported")
        sock = sockets.dial(supervisor.address, 10)
        own = keys.of_feeder(KEY, "feeder-7")
        handshake.greet(sock, own, role="feeder", name="feeder-7", job=JOB, versions=handshake.BY_ROLE)
        sockets.send_message(sock, ready)
        until(lambda: caplog.text.count("feeder-7 (i7) has reported") > before, what="the feeder's report")
        return sock

    old, new = reports(), reports()
    sockets.send_message(new, {"type": "costs", "costs": {}})
    old.shutdown(socket.SHUT_WR)
    assert old.recv(1) == b"", "the supervisor has ended the old connection"
    assert "i7" in supervisor.serving()
    new.shutdown(socket.SHUT_WR)
    until(lambda: "i7" not in supervisor.serving(), what="the feeder's loss")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda m: {**m, "protocol": handshake.SEALED - 1, "oldest": handshake.SEALED - 2},
            f"protocol version {handshake.CONTROL.newest}, which was altered to {handshake.SEALED - 1} in transit",
        ),
        (
            lambda m: {"nonce": m["nonce"].partition("-")[0], "protocol": handshake.SEALED - 1},
            "or its answer was altered in transit",
        ),
    ],
    ids=["version", "version-and-nonce"],
)
def test_nobody_on_the_path_makes_peers_speak_a_version_without_seals(
    relay: Tamperer, change: Change, text: str
) -> None:
    relay.arm(challenge=change)
    with pytest.raises(ProtocolError, match=text):
        ask(relay)
    assert ask(relay)["type"] == "status"


def test_answer_altered_on_its_way_to_a_controller_is_refused(relay: Tamperer) -> None:
    relay.arm(altered(-20, at=0), to_acceptor=False)
    with pytest.raises(BrokenSeal, match=ALTERED):
        ask(relay)
    assert ask(relay)["type"] == "status"


def ask(relay: Tamperer) -> dict[str, Any]:
    return supervision.ask(*relay.address, KEY, job=JOB, message={"type": "status"})
