"""Threads of a trainer that sleep for batches of their own: none calls off another's wake-up."""

from __future__ import annotations

import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dataloaderjob.trainer.session.client import Client

WAIT_S = 5.0


class Control:
    """Nothing is ever ready; `awake` takes as long as it may until another thread has gone to sleep."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waking, self.slept = threading.Event(), threading.Event()

    def ready(self, stream: int, number: int) -> None:
        return None

    def sleep(self, stream: int, number: int, after: int) -> bool:
        self.log.append("sleeps")
        if self.waking.is_set():
            self.slept.set()
        return True

    def awake(self) -> None:
        self.waking.set()
        self.slept.wait(0.2)
        self.log.append("is awake")


class Interrupted(Control):
    def sleep(self, stream: int, number: int, after: int) -> bool:
        raise KeyboardInterrupt


def test_interrupt_while_falling_asleep_leaves_no_sleeper() -> None:
    client: Any = object.__new__(Client)
    client._opened, client.closed_streams, client._polls = SimpleNamespace(sock=True), [], {}
    client._sleepers, client._asleep = 0, threading.RLock()
    control: Any = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        client.sleep(SimpleNamespace(id=1), 0, control, 1)
    assert client._sleepers == 0
    assert control.waking.is_set()


def test_waking_thread_does_not_cancel_another_threads_wake_up() -> None:
    here, there = socket.socketpair()
    client: Any = object.__new__(Client)
    client._opened, client.closed_streams, client._polls = SimpleNamespace(sock=here), [], {}
    client._sleepers, client._asleep, client.wake_trainer = 0, threading.RLock(), os.eventfd(0)
    control: Any = Control()
    stream: Any = SimpleNamespace(id=1, failures={})
    first = threading.Thread(target=client.sleep, args=(stream, 0, control, 1))
    first.start()
    assert control.waking.wait(WAIT_S)
    client.sleep(stream, 0, control, 1)
    first.join()
    assert control.log == ["sleeps", "is awake", "sleeps", "is awake"]
    here.close()
    there.close()
    os.close(client.wake_trainer)
