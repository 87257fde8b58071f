"""A sidecar that ends at what it is told ends again and again: the trainer is told, instead of waiting for ever."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dataloaderjob.core import control
from dataloaderjob.core.errors import ServiceUnavailable
from dataloaderjob.trainer.session import attach as attaching
from dataloaderjob.trainer.session import client
from dataloaderjob.trainer.session.attach import ENDS_WITHIN_S, MAX_ENDS, Opened, SidecarEnds
from dataloaderjob.trainer.session.client import Client


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(attaching, "time", made)
    return made


@pytest.fixture
def ours() -> Client:
    made = object.__new__(Client)
    made.path, made.dead = "/run/s", None
    made.control = control.Control(control.Control.create())
    made._ends = SidecarEnds(made.path)
    return made


def test_repeated_ends_without_a_batch_are_an_error(ours: Client, clock: Clock) -> None:
    for _ in range(MAX_ENDS - 1):
        clock.now += 0.1
        ours._check_progress()
    with pytest.raises(
        ServiceUnavailable,
        match=f"ended {MAX_ENDS} times within {ENDS_WITHIN_S:.0f} s without sending a batch",
    ):
        ours._check_progress()
    assert ours.dead is not None


def test_batch_between_two_ends_is_progress(ours: Client, clock: Clock) -> None:
    for _ in range(5 * MAX_ENDS):
        clock.now += 0.1
        ours.control.words[control.W_NEXT_CALLS] += 1
        ours._check_progress()


def test_ends_far_apart_are_tolerated(ours: Client, clock: Clock) -> None:
    for _ in range(5 * MAX_ENDS):
        clock.now += 2 * ENDS_WITHIN_S / MAX_ENDS
        ours._check_progress()


def test_receiver_dying_at_each_reattachment_ends_the_wait(
    ours: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached: list[socket.socket] = []

    def attach(*_: object) -> tuple[socket.socket, dict[str, Any], list[int]]:
        here, there = socket.socketpair()
        attached.append(here)
        there.close()
        return here, {}, []

    def send_open(stream: Any) -> None:
        raise ConnectionError("it is gone")

    mine: Any = ours
    mine.lock, mine._opened, mine.attachment, mine.rank = threading.RLock(), Opened(), 0, "0"
    mine.pool = SimpleNamespace(adoption=lambda: ({}, []), leased_nbytes=0)
    mine.closed_streams, mine.streams = [], {1: SimpleNamespace(failures={})}
    monkeypatch.setattr(client, "attach", attach)
    monkeypatch.setattr(Client, "_send_open", lambda self, stream: send_open(stream))
    with pytest.raises(ServiceUnavailable, match=f"ended {MAX_ENDS} times"):
        ours._reattach()
    assert len(attached) == MAX_ENDS
