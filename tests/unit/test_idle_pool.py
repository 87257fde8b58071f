"""A pool that nobody reads from gives its memory back, and only then."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from dataloaderjob.core.control import W_IDLE, W_REGISTERED
from dataloaderjob.sidecar import regions
from dataloaderjob.sidecar.receiver import GIVES_WAY_S, IDLE_S, Receiver

NBYTES = 4 << 20


class Pool:
    """A receiver without sockets, and what is known of its streams and its space."""

    def __init__(self, *, gives_back: bool = True) -> None:
        self.given_back = 0
        self.words = [0] * 64
        self.streams: dict[int, Any] = {1: object()}
        self.space = SimpleNamespace(used_nbytes=0)
        made: Any = object.__new__(Receiver)
        made.machine = SimpleNamespace(streams=self.streams, placer=SimpleNamespace(space=self.space))
        made.regions = {1: SimpleNamespace(give_back=self._given)}
        made._used_at, made._is_given_back, made._gives_back = 0.0, False, gives_back
        made.control = SimpleNamespace(words=self.words)
        self._receiver = made

    def _given(self) -> None:
        self.given_back += 1

    def tick(self, now: float) -> int:
        """Returns how often memory has been given back by then."""
        self._receiver._give_back(now)
        return self.given_back


def test_idle_pool_returns_its_memory_once():
    pool = Pool()
    pool.tick(100.0)
    pool.streams.clear()
    assert pool.tick(100.0 + IDLE_S - 1) == 0
    assert pool.tick(101.0 + IDLE_S) == 1
    assert pool.tick(500.0) == 1
    pool.streams[2] = object()
    pool.tick(501.0)
    pool.streams.clear()
    assert pool.tick(502.0 + IDLE_S) == 2


def test_pool_with_a_kept_batch_returns_no_memory():
    pool = Pool()
    pool.streams.clear()
    pool.space.used_nbytes = 4096
    pool.tick(100.0)
    assert pool.tick(1000.0) == 0


def test_memory_registered_by_a_device_is_kept():
    pool = Pool()
    pool.words[W_REGISTERED] = 1
    pool.streams.clear()
    assert pool.tick(1000.0) == 0


def test_pool_of_a_pod_is_left_unchanged():
    pool = Pool(gives_back=False)
    pool.streams.clear()
    assert pool.tick(1000.0) == 0


def test_trainer_that_reads_nothing_for_a_while_is_marked_idle():
    pool = Pool()
    pool.tick(100.0)
    pool.streams.clear()
    pool.tick(100.0 + GIVES_WAY_S / 2)
    assert pool.words[W_IDLE] == 0
    pool.tick(101.0 + GIVES_WAY_S)
    assert pool.words[W_IDLE] == 1
    pool.streams[2] = object()
    pool.tick(110.0)
    assert pool.words[W_IDLE] == 0


def test_returned_memory_is_free_and_can_be_refilled():
    region = regions.create(1, NBYTES, single=False)
    while region.cold:
        region.populate_some()
    assert os.fstat(region.fd).st_blocks * 512 == NBYTES
    region.give_back()
    assert os.fstat(region.fd).st_blocks == 0
    assert region.cold
    region.view[:3] = b"abc"
    assert bytes(region.view[:4]) == b"abc\0"
    region.close()


@pytest.mark.parametrize("populated", [0, NBYTES])
def test_region_returned_twice_stays_intact(populated: int):
    region = regions.create(1, NBYTES, single=False)
    region.populated = populated
    region.give_back()
    region.give_back()
    assert (region.populated, os.fstat(region.fd).st_size) == (0, NBYTES)
    region.close()
