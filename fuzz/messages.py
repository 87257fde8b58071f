"""Targets: handshakes, messages of JSON, the sidecar's packets, addresses, a supervisor's status, and the
answers of Ray's container to the supervisor."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from dataloaderjob.core import ipc, sockets, supervision
from dataloaderjob.core.errors import AuthError, RemoteProtocolError
from dataloaderjob.core.handshake import MAX_HELLO_NBYTES, ClientHandshake, ServerHandshake
from dataloaderjob.providers import link
from dataloaderjob.providers.provider import Why
from dataloaderjob_operator.decide import supervisor_status
from fuzz.target import Target, mutate_bytes, mutate_json

KEY = bytes(range(32))
JOB = "team/mnist/1234"
_FACTS: dict[str, Any] = {"slots": 2, "name": "feeder-0"}


def _client() -> ClientHandshake:
    return ClientHandshake(KEY, role="sidecar", name="trainer-0", job=JOB, facts=_FACTS)


def _same_nonces() -> AbstractContextManager[object]:
    """Every nonce is the same, so that a message of one handshake is valid in another."""
    return mock.patch.object(os, "urandom", lambda n: bytes(n))


def _dialogue() -> tuple[bytes, bytes, bytes]:
    """The three messages of one handshake."""
    with _same_nonces():
        client, server = _client(), ServerHandshake(KEY, job=JOB, facts=_FACTS)
        reply = client.receive(server.greeting)
        return server.greeting, reply, server.receive(reply)


def _texts(packed: bytes) -> bytes:
    return packed[sockets.LENGTH.size :]


def _framed(data: bytes) -> bytes:
    """The text as a message of the right length."""
    return sockets.LENGTH.pack(len(data)) + data


def _greeting(data: bytes) -> None:
    """A stranger answers our connection: with the challenge, or with the end of the handshake."""
    with _same_nonces():
        client = _client()
        if b'"protocol"' not in data:
            client.receive(ServerHandshake(KEY, job=JOB).greeting)
        client.receive(_framed(data))


def _answer(data: bytes) -> None:
    """A stranger connects to us."""
    with _same_nonces():
        ServerHandshake(KEY, job=JOB, facts=_FACTS).receive(_framed(data))


def _stream(data: bytes) -> None:
    """Bytes without a right length, in two pieces."""
    middle = len(data) // 2
    with _same_nonces():
        handshake = _client() if b'"oldest"' in data else ServerHandshake(KEY, job=JOB, facts=_FACTS)
        for piece in (data[:middle], data[middle:]):
            if not handshake.done:
                handshake.receive(piece)
                assert handshake.done or 0 <= handshake.wanted <= MAX_HELLO_NBYTES + sockets.LENGTH.size


def _packets(data: bytes) -> None:
    assembler = ipc.Assembler(limit_nbytes=4096)
    for at in range(0, len(data), 64):
        if (packet := assembler.feed(data[at : at + 64])) is not None:
            ipc.parse_json(packet.payload)


def _packed() -> Sequence[bytes]:
    message = ipc.pack_json(ipc.Type.NOTE, {"text": "x"}, stream=1)
    return [b"".join(message), b"".join(ipc.pack(ipc.Type.FAILED, b"{}", ticket=3))]


def _mutate_stream(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return mutate_bytes(data, chance)
    return _framed(mutate_json(_texts(data), chance))


def _status(data: bytes) -> None:
    message = sockets.parse_message(data)
    supervisor_status.parse(message)
    readings = supervisor_status.readings(message)
    rates = supervision.between(readings, readings, 1.0)
    written = supervisor_status.loader_status(rates)
    supervisor_status.notable(written, written)


def _statuses() -> Sequence[bytes]:
    feeder = {
        "name": "feeder-0",
        "state": "ready",
        "cause": "OutOfMemory",
        "why": "it ran out",
        "host": "10.0.0.1",
    }
    failure = {
        "sidecar": "t-0",
        "rank": 0,
        "feeder": "feeder-0",
        "reason": "UserCodeFailed",
        "text": "KeyError: 1",
    }
    metrics = dict.fromkeys(supervision.READ, 7)
    full: dict[str, Any] = {
        "type": "status", "pid": 1, "up_seconds": 3, "desired": 2, "ready": 1, "notes": ["a"], "feeders": [feeder],
        "sidecars": {"t-0": {"metrics": metrics, "receivers": 1}}, "failures": [failure],
        "ray": {"version": "2.56.0", "worker_register_timeout_seconds": 120, "health_check_period_ms": 3000},
    }  # fmt: skip
    return [
        json.dumps(one).encode()
        for one in (full, supervision.brief(full), {"type": "status", "desired": 1, "ready": 1})
    ]


def _provider_answer(data: bytes) -> None:
    answer = link.parse(data)
    link.failure(answer)
    for field, read in _READERS.items():
        if field in answer:
            read(answer)


def _provider_answers() -> Sequence[bytes]:
    why = Why(1, supervision.Cause.NO_ROOM, "no node has room", dead=False, host="10.0.0.1")
    full = [link.hello("s", {"version": "2.60.0"}), {"found": [0, 1]}, {"done": True}, link.error("no")]
    parts = [*link.late_parts([why]), *link.memory_parts({"10.0.0.1": "it ran out"})]
    return [link.pack(one)[link.LENGTH.size :] for one in (*full, *parts)]


_READERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "session": link.read_hello,
    "found": link.read_found,
    "done": link.read_done,
    "late": lambda answer: link.LateReader([0, 1]).add(answer),
    "memory": lambda answer: link.MemoryReader().add(answer),
}
_REFUSED = (RemoteProtocolError,)
_UNKNOWN = (RemoteProtocolError, AuthError)
TARGETS = (
    Target(
        name="handshake-client",
        parse=_greeting,
        seeds=lambda: [_texts(_dialogue()[0]), _texts(_dialogue()[2]), b'{"error":"no"}'],
        declared=_UNKNOWN,
        mutate=mutate_json,
        max_nbytes=MAX_HELLO_NBYTES,
    ),
    Target(
        name="handshake-server",
        parse=_answer,
        seeds=lambda: [_texts(_dialogue()[1])],
        declared=_UNKNOWN,
        mutate=mutate_json,
        max_nbytes=MAX_HELLO_NBYTES,
    ),
    Target(
        name="handshake-streams",
        parse=_stream,
        seeds=lambda: list(_dialogue()),
        declared=_UNKNOWN,
        mutate=_mutate_stream,
    ),
    Target(name="sidecar-packets", parse=_packets, seeds=_packed, declared=_REFUSED),
    Target(
        name="addresses",
        parse=lambda data: sockets.parse_address(data.decode("utf-8", "replace")),
        seeds=lambda: [b"10.0.0.1:6400", b"[::1]:80"],
        declared=(ValueError,),
    ),
    Target(
        name="provider-answers",
        parse=_provider_answer,
        seeds=_provider_answers,
        declared=_REFUSED,
        mutate=mutate_json,
    ),
    Target(name="supervisor-status", parse=_status, seeds=_statuses, declared=_REFUSED, mutate=mutate_json),
)
