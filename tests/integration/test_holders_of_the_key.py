"""Whoever holds a job's key and breaks its protocols ends his own connection, and changes no batch and no process."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from batches import Numbers, fingerprint
from feeder_client import Receiver, Squares, bundle_of
from impostor import INSTANCE, Deed, InfiltratedRig, Link
from live_job import LONGEST_WAIT_S, LiveJob
from patience import PATIENCE_S
from rig import until
from strangers import call, heard

from dataloaderjob import DataLoader
from dataloaderjob.core import frames, handshake, keys, sockets, supervision, ticket_codec
from dataloaderjob.core.blobs import MAX_MANIFEST_NBYTES, Bundle
from dataloaderjob.core.errors import RemoteProtocolError, ServiceError, UserCodeError
from dataloaderjob.core.frames import HEADER_NBYTES, MAGIC, PROTOCOL, Flag, FrameKind
from dataloaderjob.making.failures import pack_failure
from dataloaderjob.supervisor.server import MAX_METRICS_NBYTES
from dataloaderjob.trainer.session.stream import SlotEndedError
from processes import children


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveJob]:
    with LiveJob(tmp_path_factory.mktemp("k")) as made:
        yield made


def receiver(job: LiveJob) -> Receiver:
    return Receiver(job.ports["feeder-0"], job.link_key("feeder-0"), job=job.name)


# Receivers


def header(
    *, magic: int = MAGIC, version: int = PROTOCOL, kind: int = FrameKind.TICKET, nbytes: int = 0, room: int = 0,
    check: int | None = None,
) -> bytes:  # fmt: skip
    """Of any frame, also one that `pack_header` would not make."""
    head = frames._HEAD.pack(magic, version, kind, 0, 0, 1, 0, bytes(16), nbytes, room)
    return head + struct.pack("<I", zlib.crc32(head) if check is None else check)


def bundle_frame(manifest: bytes) -> bytes:
    return frames.pack_header(FrameKind.BUNDLE, nbytes=len(manifest), bundle=bytes(16)) + manifest


def manifest(blobs: Any, **fields: Any) -> bytes:
    return json.dumps({"blobs": blobs, "allow_pickle": False, "facts": {}, **fields}).encode()


DIGEST = "0" * 64
FRAMES = {
    "magic": (header(magic=0x4A45), "a frame header is corrupt"),
    "check": (header(check=7), "a frame header is corrupt"),
    "version": (header(version=PROTOCOL + 1), f"version {PROTOCOL}, but the peer speaks {PROTOCOL + 1}"),
    "kind-of-a-feeder": (header(kind=FrameKind.BODY), "a frame of kind 5 is not allowed"),
    "no-kind": (header(kind=200), "a frame of kind 200 is not allowed"),
    "length-2-63": (header(nbytes=2**63), f"a TICKET frame of {2**63} bytes exceeds"),
    "length-2-64": (header(nbytes=2**64 - 1), f"a TICKET frame of {2**64 - 1} bytes exceeds"),
    "room-2-63": (header(room=2**63), "a TICKET frame of 0 bytes exceeds"),
    "taken-of-none": (header(kind=FrameKind.TAKEN), "a peer reports a batch as taken, but none was offered"),
    "no-ticket": (header(nbytes=3) + b"abc", "a ticket must have at least"),
    "no-manifest": (bundle_frame(os.urandom(100)), "a bundle's manifest cannot be read"),
    "nested-manifest": (bundle_frame(b"[" * 100_000), "a bundle's manifest cannot be read"),
    "manifest-of-another": (bundle_frame(manifest([[DIGEST, 1]])), "was sent under id 0000"),
    "blob-of-any-size": (bundle_frame(manifest([[DIGEST, 10**400]])), "not a SHA-256"),
    "blob-elsewhere": (bundle_frame(manifest([["../../key", 32]])), "not a SHA-256"),
}  # fmt: skip


def test_malformed_frame_closes_its_connection_with_a_log_line(job: LiveJob) -> None:
    with job.unimpressed():
        for what, (data, text) in FRAMES.items():
            before = job.said().count(text)
            with receiver(job) as bad:
                bad.say(data[:HEADER_NBYTES], data[HEADER_NBYTES:])
                assert heard(bad.sock) == b"", what
            until(lambda t=text, n=before: job.said().count(t) > n, what=f"a line of {what}")


class Ends:
    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, (1,)


class Exits:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit(3)",)


def ticket(form: int, count: int, keys: bytes) -> bytes:
    return struct.pack("<QQBBHI", 7, 0, 0, form, 0, count) + keys


TICKETS = {
    "unknown-form": ticket(9, 1, bytes(8)),
    "more-keys-than-there-are": ticket(0, 5, bytes(8)),
    "count-2-32": ticket(0, 2**32 - 1, b""),
    "no-keys": ticket(0, 0, b""),
    "out-of-range": ticket(0, 1, struct.pack("<q", 2**62)),
    "no-pickle": ticket(1, 1, b"\xff" * 40),
    "cut-pickle": ticket(1, 1, pickle.dumps(["a" * 100])[:50]),
    "pickle-of-another-count": ticket(1, 2, pickle.dumps([1])),
    "pickle-without-length": ticket(1, 1, pickle.dumps(7)),
    "pickle-of-an-end": ticket(1, 1, pickle.dumps([Ends()])),
    "pickle-that-exits": ticket(1, 1, pickle.dumps(Exits())),
    "nested-pickle": ticket(1, 1, b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b"."),
    "items-that-are-none": ticket(3, 1, pickle.dumps(None)),
    "unknown-class": ticket(1, 1, b"\x80\x04cno_such_module\nThing\n."),
}


def test_malformed_tickets_fail_individually(job: LiveJob) -> None:
    bundle = bundle_of(Squares(), job.home / "blobs")
    with job.unimpressed(), receiver(job) as bad:
        bad.know(bundle)
        for number, payload in enumerate(TICKETS.values()):
            bad.send(FrameKind.TICKET, payload, stream=1, ticket=number, bundle=bundle.id, room=1 << 20)
        bad.ticket(99, [3], bundle.id)
        told = [bad.next() for _ in range(len(TICKETS) + 1)]
        failed = {frame.header.ticket for frame in told if frame.kind is FrameKind.FAILED}
        assert failed == set(range(len(TICKETS)))
        assert told[-1].batch().tolist() == [9]


def test_manifest_too_long_for_a_feeder_closes_its_connection(job: LiveJob) -> None:
    long = Bundle(blobs=((DIGEST, 1),) * 2500)
    escaped = Bundle(blobs=((DIGEST, 1),), facts={"x": "é" * 30_000})
    with job.unimpressed():
        for bundle in (long, escaped):
            with receiver(job) as bad:
                bad.ticket(0, [1], bad.know(bundle))
                with pytest.raises(ConnectionError):
                    bad.next()
        until(lambda: job.said().count(f"exceeds {MAX_MANIFEST_NBYTES}") == 2, what="a line of each")


@pytest.mark.thorough
def test_frames_with_corrupt_bytes_close_at_most_their_own_connection(job: LiveJob) -> None:
    chance = random.Random(3)
    bundle = bundle_of(Squares(), job.home / "blobs")
    payload = ticket_codec.pack_ticket(7, 0, [1, 2])
    good = [
        frames.pack_header(FrameKind.TICKET, nbytes=len(payload), bundle=bundle.id, room=1 << 20) + payload,
        frames.pack_header(FrameKind.BUNDLE, nbytes=len(bundle.manifest()), bundle=bundle.id) + bundle.manifest(),
        frames.pack_header(FrameKind.GRANT, room=1 << 20), frames.pack_header(FrameKind.CANCEL),
        frames.pack_header(FrameKind.RELEASE, bundle=bundle.id),
    ]  # fmt: skip
    ended = 0
    with job.unimpressed():
        for _ in range(200):
            chosen = chance.choices(good, k=4)
            data = bytearray(b"".join(chosen))
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            if chance.random() < 0.3:  # what the check of the header does not notice
                end = HEADER_NBYTES - 4
                data[end:HEADER_NBYTES] = struct.pack("<I", zlib.crc32(data[:end]))
            with receiver(job) as bad:
                for length in map(len, chosen):
                    with contextlib.suppress(ConnectionError):  # the first of them may have ended it
                        bad.say(bytes(data[:HEADER_NBYTES]), bytes(data[HEADER_NBYTES:length]))
                    del data[:length]
                bad.sock.settimeout(0.02)
                try:
                    heard(bad.sock)
                    ended += 1
                except TimeoutError:
                    pass
    assert ended > 50


# The supervisor


VALUES: list[Any] = [None, True, -1, 10**30, 0.5, "", "x" * 5000, [], [[[]]], {}, {"a": {}}]
SUPERVISED = {
    "control": [{"type": "scale", "feeders": v} for v in [*VALUES, 1e9]] + [{"type": v} for v in VALUES] + [{}],
    "sidecar": [{"type": kind, **dict.fromkeys(("digest", "name", "instance", "reason"), v)}
                for kind in ("have", "replace") for v in VALUES] + [{"type": v} for v in VALUES] + [{}],
    "feeder": [{"type": "ready", **dict.fromkeys(("instance", "host", "port", "pid", "node", "session"), v)}
               for v in VALUES] + [{"type": "ended", "cause": v, "why": v} for v in VALUES]
              + [{"type": "drained"}, {"type": "ended", "cause": "OutOfMemory"}, {}],
    "blob": [{"type": kind, "digest": v, "nbytes": v} for kind in ("get", "blob") for v in VALUES]
            + [{"type": "get", "digest": "../../key", "nbytes": 32}, {}],
    "upload": [{"type": kind, "digest": v, "nbytes": v} for kind in ("get", "blob") for v in VALUES]
              + [{"type": "blob", "digest": "0" * 64, "nbytes": 32}, {}],
}  # fmt: skip


@pytest.mark.parametrize("role", SUPERVISED)
def test_junk_messages_close_their_connection_or_get_an_error(job: LiveJob, role: str) -> None:
    with job.unimpressed():
        before = job.service.status()
        for message in SUPERVISED[role]:
            with call(job.ports["supervisor"]) as sock:
                handshake.greet(sock, keys.of_job(job.key), role=role, name="feeder-7", job=job.name)
                sock.settimeout(PATIENCE_S)
                sockets.send_message(sock, message)
                if role == "control":
                    assert sockets.recv_message(sock)["type"] == "error"
                    continue
                if role == "sidecar":  # any text may be a feeder's name
                    sockets.send_message(sock, {"type": "no such"})
                told = heard(sock)
                assert role == "sidecar" or told == b"", message
        after = job.service.status()
        for status in (before, after):
            for changing in ("up_seconds", "sidecars", "measures"):
                del status[changing]
            for feeder in status["feeders"]:
                del feeder["seconds"], feeder["costs"]
        assert after == before


NO_MESSAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "nested": (lambda: b"[" * MAX_METRICS_NBYTES, "a message is not JSON"),
    "long-number": (lambda: b'{"type": 1' + b"0" * 10_000 + b"}", "a message is not JSON"),
    "list": (lambda: b"[]", "a message is not a JSON object"),
    "too-long": (lambda: bytes(MAX_METRICS_NBYTES + 1), f"exceeds {MAX_METRICS_NBYTES}"),
}


@pytest.mark.parametrize("what", NO_MESSAGES)
def test_malformed_message_closes_its_connection_with_a_log_line(job: LiveJob, what: str) -> None:
    make, text = NO_MESSAGES[what]
    data = make()
    with job.unimpressed(), call(job.ports["supervisor"]) as sock:
        handshake.greet(sock, keys.of_job(job.key), role="sidecar", name=what, job=job.name)
        sock.settimeout(20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            assert sock.seals is not None
            sock.sendall(sock.seals.out.seal(sockets.LENGTH.pack(len(data)), data))
        heard(sock)
        until(lambda: f"closed the connection of {what}: " in job.said())
        assert text in job.said()


def test_junk_metrics_are_kept_until_their_sidecar_disconnects(job: LiveJob) -> None:
    with job.unimpressed():
        with call(job.ports["supervisor"]) as sock:
            handshake.greet(sock, keys.of_job(job.key), role="sidecar", name="junk", job=job.name)
            for value in VALUES:
                junk = dict.fromkeys(("metrics", "receivers", "failures"), value)
                sockets.send_message(sock, {"type": "metrics", **junk})
                until(lambda v=value: job.service.status()["sidecars"].get("junk", {}).get("metrics") == v)
        until(lambda: "junk" not in job.service.status()["sidecars"])


# A feeder


@pytest.fixture(scope="module")
def rig() -> Iterator[InfiltratedRig]:
    with InfiltratedRig(feeders=2) as made:
        yield made


def silent(link: Link) -> None:
    link.ticket()


def ends_in_the_middle_of_a_body(link: Link) -> None:
    link.send(FrameKind.BODY, link.ticket(), bytes(100), nbytes=400)
    link.sock.close()


def body_of_no_ticket(link: Link) -> None:
    about = link.ticket()
    for kind in (FrameKind.BODY, FrameKind.ANNOUNCE, FrameKind.FAILED, FrameKind.LOST, FrameKind.PROGRESS):
        payload = b"" if kind in (FrameKind.ANNOUNCE, FrameKind.PROGRESS) else b"x" * 100
        link.send(kind, about, payload, ticket=2**64 - 1)
        link.send(kind, about, payload, stream=2**32 - 1)


def body_larger_than_its_room(link: Link) -> None:
    about = link.ticket()
    link.send(FrameKind.BODY, about, bytes(about.room + 4096))


def body_of(nbytes: int) -> Deed:
    def body_of_any_size(link: Link) -> None:
        link.send(FrameKind.BODY, link.ticket(), nbytes=nbytes)

    return body_of_any_size


def garbage(link: Link) -> None:
    link.ticket()
    link.sock.sendall(random.Random(4).randbytes(5000))


def frame_of_a_receiver(link: Link) -> None:
    link.send(FrameKind.TICKET, link.ticket())


def wrong_check(link: Link) -> None:
    link.ticket()
    link.say(header(kind=FrameKind.NOTE, check=1))


def flood(link: Link) -> None:
    about = link.ticket()
    for _ in range(2000):
        for kind in (FrameKind.NEED_BUNDLE, FrameKind.PROGRESS, FrameKind.CANCELLED, FrameKind.ALIVE):
            link.send(kind, about, room=2**40)
    link.send(FrameKind.NOTE, about, b"\xff" * 1000)


def trickles(link: Link) -> None:
    link.send(FrameKind.BODY, link.ticket(), nbytes=400)
    link.trickle(bytes(8), 0.3)


def end_of_a_slot(link: Link) -> None:
    """The dataset is map-style, and has none."""
    link.send(FrameKind.FAILED, link.ticket(), frames.pack_end(0), flags=Flag.ENDED)


def failing_with(payload: bytes) -> Deed:
    """Every ticket fails in this way."""

    def fails(link: Link) -> None:
        while True:
            link.send(FrameKind.FAILED, link.ticket(), payload)

    return fails


DEEDS: dict[str, Callable[[Link], None]] = {
    deed.__name__: deed
    for deed in (
        silent, ends_in_the_middle_of_a_body, body_of_no_ticket, body_larger_than_its_room, garbage,
        frame_of_a_receiver, wrong_check, flood, trickles, end_of_a_slot,
    )
} | {"body_of_2_40": body_of(2**40), "body_of_2_63": body_of(2**63)}  # fmt: skip
ENDED = {"garbage", "frame_of_a_receiver", "wrong_check", "body_of_2_63", "end_of_a_slot"}
"""After these a receiver ends the connection."""
SAID: dict[str, Any] = {
    "another-process": {"instance": "another"},
    "nobody": {},
    "no-object": [1],
    "other-torch": {"instance": INSTANCE, "torch": [1, {}]},
}


def taken(rig: InfiltratedRig, what: threading.Event) -> float:
    """Iterates until `what` has happened; returns the longest wait for a batch."""
    gc.collect()
    until(lambda: not rig.status()["receivers"], what="the end of the receiver before")
    dataset = Numbers(400, seconds=0.002)
    expected = [fingerprint(batch) for batch in DataLoader(Numbers(400), batch_size=4, num_workers=0)]
    longest_s, receivers = 0.0, set()
    kept = iter(DataLoader(Numbers(40)))  # and with it the pool
    for _ in range(8):
        batches = iter(DataLoader(dataset, batch_size=4))
        for wanted in expected:
            began = time.monotonic()
            batch = next(batches)
            longest_s = max(longest_s, time.monotonic() - began)
            assert fingerprint(batch) == wanted
        assert rig.sidecar is not None
        receivers |= set(children(rig.sidecar.pid))
        if what.is_set():
            break
    assert what.is_set()
    assert len(receivers) == 1, rig.logs()
    assert len(list(kept)) == 40
    return longest_s


@pytest.mark.thorough
@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.quick(
    "ends_in_the_middle_of_a_body",
    "body_of_no_ticket",
    "body_larger_than_its_room",
    "garbage",
    "wrong_check",
    "body_of_2_63",
    "end_of_a_slot",
)
def test_feeder_breaking_the_protocol_changes_no_batch(rig: InfiltratedRig, deed: str) -> None:
    with rig.impostor.doing(DEEDS[deed]) as doing:
        assert taken(rig, doing.ended if deed in ENDED else doing.done) < LONGEST_WAIT_S


FAILURES: dict[str, tuple[bytes, type[Exception]]] = {
    "StopIteration": (pack_failure(StopIteration()), UserCodeError),
    "internal-class": (pack_failure(SlotEndedError(0)), UserCodeError),
    "end": (frames.pack_end(0), RemoteProtocolError),
    "garbage": (b"\xff\xfe", RemoteProtocolError),
    "deadline": (supervision.pack_failure("DeadlineExceeded", "feeder-0 is late"), ServiceError),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failures_chosen_by_a_feeder_never_end_a_loop(rig: InfiltratedRig, failure: str) -> None:
    payload, expected = FAILURES[failure]
    batches, errors = 0, []
    with rig.impostor.doing(failing_with(payload)):
        for _ in range(20):
            iterator = iter(DataLoader(Numbers(400, seconds=0.002), batch_size=4))
            for _ in range(100):
                try:
                    batches += len(next(iterator)) > 0
                except Exception as exc:
                    errors.append(type(exc))
            if errors:
                break
    assert {*errors} == {expected}
    assert (batches + len(errors)) % 100 == 0


@pytest.mark.thorough
@pytest.mark.parametrize("said", SAID)
def test_feeder_with_false_facts_gets_no_work(rig: InfiltratedRig, said: str) -> None:
    with rig.impostor.doing(silent, SAID[said]) as doing:
        assert taken(rig, doing.greeted) < LONGEST_WAIT_S
        assert not doing.done.is_set(), "it was asked for a batch"
