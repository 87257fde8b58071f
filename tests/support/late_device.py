"""A simulated device. Its copies happen late, and read whatever lies there then; who has waited for an event reads what
a device would hold."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from typing import Any

import pytest
import torch

from dataloaderjob.trainer.device.transfer import ToDevice


class Event:
    """Of a stream: it has come once all before it is done."""

    def __init__(self) -> None:
        self.has_come = False


class LateDevice:
    """Work is done one by one, when `step` is called."""

    def __init__(self) -> None:
        self._line: deque[tuple[int, torch.Tensor] | Event] = deque()
        self._lock = threading.RLock()
        self.registered: dict[int, int] = {}
        self.takes_memory = True
        self.copies = 0

    def follow(self) -> None:
        pass

    def begin(self) -> None:
        pass

    def register(self, address: int, nbytes: int, mapping: Any) -> bool:
        if self.takes_memory:
            self.registered[address] = nbytes
        return self.takes_memory

    @contextlib.contextmanager
    def stream(self) -> Any:
        yield

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """It knows the address of what it reads, and holds nothing of it."""
        if getattr(tensor, "was_copied", False):
            return tensor
        made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        made.was_copied = True  # type: ignore[attr-defined]
        if not tensor.is_contiguous():
            return made.copy_(tensor)
        with self._lock:
            self._line.append((tensor.data_ptr(), made))
        return made

    def record(self) -> Event:
        event = Event()
        with self._lock:
            self._line.append(event)
        return event

    def query(self, event: Event) -> bool:
        return event.has_come

    def synchronize(self, event: Event) -> None:
        while not event.has_come:
            self.step()

    def wait(self, event: Event) -> None:
        """A real one has a stream wait; here nobody reads before."""
        self.synchronize(event)

    def keep(self, tensor: torch.Tensor) -> None:
        assert getattr(tensor, "was_copied", False)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def step(self) -> bool:
        """Does the next piece of work. Returns False if there is none."""
        with self._lock:
            if not self._line:
                return False
            work = self._line.popleft()
            if isinstance(work, Event):
                work.has_come = True
            else:
                address, made = work
                self.copies += 1
                ctypes.memmove(made.data_ptr(), address, made.nbytes)
            return True


class BusyDevice(LateDevice):
    """One that works by itself, in a thread, after delays at random."""

    def __init__(self, seed: int, most_s: float = 0.004) -> None:
        super().__init__()
        self._random, self._most_s = random.Random(seed), most_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._over.wait(self._random.uniform(0.0, self._most_s)):
            self.step()

    def synchronize(self, event: Event) -> None:
        while not event.has_come:
            if self._over.wait(0.0002):  # of an iterator that outlived its test
                self.step()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        while self.step():
            pass


def forget_what_copies_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are given back while copies of them are under way: what a test of the waiting has to notice."""
    send = ToDevice.send

    def careless(transfer: ToDevice, *what: Any) -> Any:
        sent = send(transfer, *what)
        transfer._held.clear()
        return sent

    monkeypatch.setattr(ToDevice, "send", careless)
