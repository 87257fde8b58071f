"""User code in a feeder: its errors, its set-up, and what it does to the process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from feeder_client import Deadly, Receiver, Squares, bundle_of
from feeder_serving import KEY, Connect, blobs, connecting, feeder_process, serving

from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import InputError, UserCodeError
from dataloaderjob.core.frames import Flag, Kind
from dataloaderjob.feeder.server import FeederServer
from dataloaderjob.fetch.failures import unpack_failure


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FeederServer]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture
def connect(server: FeederServer) -> Iterator[Connect]:
    with connecting(server) as made:
        yield made


@pytest.fixture
def squares(tmp_path: Path) -> Bundle:
    return bundle_of(Squares(), blobs(tmp_path))


def test_an_error_of_user_code_names_index_feeder_and_line(connect: Connect, squares: Bundle):
    with connect() as receiver:
        bundle = receiver.know(squares)
        receiver.ticket(0, [1, 5000], bundle)
        frame = receiver.next()
        assert frame.kind is Kind.FAILED
        error = unpack_failure(frame.payload)
        assert isinstance(error, IndexError)
        assert "index 5000 of 1000" in str(error)
        assert "for index 5000 in feeder-0" in str(error)
        assert "feeder_client.py" in str(error)
        receiver.ticket(1, [1], bundle)
        assert receiver.next().kind is Kind.BODY, "the feeder goes on"


def test_a_batch_that_cannot_travel_names_the_leaf(connect: Connect, tmp_path: Path):
    with connect() as receiver:
        bundle = receiver.know(bundle_of(Squares(), blobs(tmp_path), collate_fn=lambda s: {"x": object()}))
        receiver.ticket(0, [1], bundle)
        error = unpack_failure(receiver.next().payload)
        assert isinstance(error, InputError)
        assert 'batch["x"]' in str(error) or "batch['x']" in str(error)
        assert "allow_pickle" in str(error)


def test_sys_exit_in_user_code_fails_the_batch_and_not_the_feeder(connect: Connect, tmp_path: Path):
    with connect() as receiver:
        bundle = receiver.know(bundle_of(Squares(), blobs(tmp_path), collate_fn=lambda s: sys.exit(3)))
        receiver.ticket(0, [1], bundle)
        assert isinstance(unpack_failure(receiver.next().payload), UserCodeError)
        receiver.ticket(1, [1], bundle)
        assert receiver.next().kind is Kind.FAILED


def test_worker_init_fn_runs_once_and_worker_info_answers(connect: Connect, tmp_path: Path):
    seen = tmp_path / "seen"

    def init(worker_id: int) -> None:
        info = torch.utils.data.get_worker_info()
        with seen.open("a") as out:
            out.write(json.dumps([worker_id, info.id, info.num_workers, len(info.dataset)]) + "\n")

    def collate(samples: list[torch.Tensor]) -> list[int]:
        return [
            torch.utils.data.get_worker_info().id,
            torch.utils.data.get_worker_info().seed,
            torch.get_num_threads(),
        ]

    with connect() as receiver:
        bundle = receiver.know(bundle_of(Squares(), blobs(tmp_path), collate_fn=collate, worker_init_fn=init))
        receiver.ticket(0, [1], bundle, base_seed=7)
        receiver.ticket(1, [1], bundle, base_seed=8)
        assert [receiver.next().batch() for _ in range(2)] == [[0, 7, 1], [0, 8, 1]]
    assert seen.read_text().splitlines() == ["[0, 0, 1, 1000]"]


def test_a_failing_worker_init_fn_fails_every_ticket_of_its_bundle(connect: Connect, tmp_path: Path):
    def init(worker_id: int) -> None:
        raise PermissionError(13, "no disk for you")

    with connect() as receiver:
        bundle = receiver.know(bundle_of(Squares(), blobs(tmp_path), worker_init_fn=init))
        for k in range(2):
            receiver.ticket(k, [1], bundle)
            error = unpack_failure(receiver.next().payload)
            assert isinstance(error, PermissionError)
            assert "worker_init_fn" in str(error)


def test_ten_datasets_are_served_although_eight_stay_loaded(connect: Connect, tmp_path: Path):
    with connect() as receiver:
        bundles = [receiver.know(bundle_of(Squares(n + 1), blobs(tmp_path))) for n in range(10)]
        for turn in range(2):
            for n, bundle in enumerate(bundles):
                receiver.ticket(turn * 10 + n, [n], bundle)
                assert receiver.next().batch().tolist() == [n * n]


def test_user_code_that_forks_does_not_keep_the_link_open(tmp_path: Path):
    def collate(samples: list[torch.Tensor]) -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        return pid

    with feeder_process(tmp_path) as (process, ready), Receiver(ready["port"], KEY) as receiver:
        bundle = receiver.know(bundle_of(Squares(), blobs(tmp_path), collate_fn=collate))
        receiver.ticket(0, [1], bundle)
        child = receiver.next().batch()
        process.kill()
        process.wait()
        try:
            with pytest.raises(ConnectionError):
                receiver.read()
        finally:
            os.kill(child, 9)


def test_a_feeder_by_itself_names_the_sample_that_kills_it(tmp_path: Path):
    with feeder_process(tmp_path) as (process, ready), Receiver(ready["port"], KEY) as receiver:
        assert ready["pid"] == process.pid
        assert receiver.facts["instance"] == ready["instance"]
        bundle = receiver.know(bundle_of(Deadly(), blobs(tmp_path)))
        receiver.ticket(0, [11, 12, 13, 14], bundle, flags=Flag.PROBE)
        assert [receiver.next().header.room for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ConnectionError):
            receiver.read()
        assert process.wait(10) == 0
