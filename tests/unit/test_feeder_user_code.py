"""User code in a feeder: its errors, its set-up, and what it does to the process."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from feeder_client import Deadly, Gated, Receiver, Squares, bundle_of, wait_until
from feeder_serving import KEY, Connect, Served, blobs, connecting, feeder_process, serving

from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import InputError, UserCodeError
from dataloaderjob.core.frames import Flag, FrameKind
from dataloaderjob.feeder.builders import HUNG_S
from dataloaderjob.making.failures import unpack_failure


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made


@pytest.fixture
def connect(server: Served) -> Iterator[Connect]:
    with connecting(server) as made:
        yield made


@pytest.fixture
def squares(tmp_path: Path) -> Bundle:
    return bundle_of(Squares(), blobs(tmp_path))


def test_user_code_error_names_index_feeder_and_line(connect: Connect, squares: Bundle):
    with connect() as receiver:
        bundle = receiver.know(squares)
        receiver.ticket(0, [1, 5000], bundle)
        frame = receiver.next()
        assert frame.kind is FrameKind.FAILED
        error = unpack_failure(frame.payload)
        assert isinstance(error, IndexError)
        assert "index 5000 of 1000" in str(error)
        (note,) = error.__notes__
        assert "for index 5000 in feeder-0" in note
        assert "feeder_client.py" in note
        receiver.ticket(1, [1], bundle)
        assert receiver.next().kind is FrameKind.BODY, "the feeder goes on"


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
        assert receiver.next().kind is FrameKind.FAILED


def test_worker_init_fn_runs_once_in_a_session_and_worker_info_answers(connect: Connect, tmp_path: Path):
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
            assert "worker_init_fn" in error.__notes__[0]


def test_ten_datasets_are_served_in_turns_and_each_is_loaded_once(connect: Connect, tmp_path: Path):
    loads = []
    with connect() as receiver:
        bundles = [receiver.know(bundle_of(Squares(n + 1), blobs(tmp_path))) for n in range(10)]
        for turn in range(2):
            for n, bundle in enumerate(bundles):
                receiver.ticket(turn * 10 + n, [n], bundle)
                frame = receiver.next()
                assert frame.batch().tolist() == [n * n]
                loads.append(frame.header.room)
    assert loads == [*range(1, 11), *[10] * 10]


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


@pytest.mark.parametrize("flags", [0, Flag.PROBE])
def test_sample_that_ends_its_process_is_named_and_the_feeder_continues(
    connect: Connect, tmp_path: Path, flags: int
):
    with connect() as receiver:
        bundle = receiver.know(bundle_of(Deadly(), blobs(tmp_path)))
        receiver.ticket(0, [11, 12, 13, 14], bundle, flags=flags)
        receiver.ticket(1, [1, 2], bundle)
        if flags:
            assert [receiver.next().header.room for _ in range(3)] == [0, 1, 2]
        lost = receiver.next()
        assert (lost.kind, lost.header.ticket, lost.header.room) == (FrameKind.LOST, 0, 3)
        assert lost.payload == b"ended with exit code 0"
        assert receiver.next().batch().tolist() == [1, 4]


def test_standalone_feeder_ends_with_its_host(tmp_path: Path):
    with feeder_process(tmp_path) as (process, ready), Receiver(ready["port"], KEY) as receiver:
        assert receiver.facts["instance"] == ready["instance"]
        process.kill()
        with pytest.raises(ConnectionError):
            receiver.read()
    wait_until(lambda: not Path(f"/proc/{ready['pid']}").exists(), 5, "the feeder is gone")


def test_session_begins_with_the_dataset_as_shipped(connect: Connect, tmp_path: Path):
    class Counting(Squares):
        calls = 0

        def __getitem__(self, i: int) -> torch.Tensor:
            self.calls += 1
            type(self).total = getattr(type(self), "total", 0) + 1
            return torch.tensor([self.calls, type(self).total])

    shipped = bundle_of(Counting(), blobs(tmp_path))
    with connect() as receiver:
        for epoch in range(3):
            session = receiver.know(replace(shipped, epoch=epoch))
            receiver.ticket(0, [0, 1], session, stream=epoch + 1)
            assert receiver.next().batch().tolist() == [[1, 1], [2, 2]]


def test_released_session_ends_its_process_but_keeps_the_bundle_loaded(connect: Connect, tmp_path: Path):
    def collate(samples: list[torch.Tensor]) -> list[int]:
        return [os.getpid(), os.getppid()]

    shipped = bundle_of(Squares(), blobs(tmp_path), collate_fn=collate)
    parents = set()
    with connect() as receiver:
        for epoch in range(3):
            session = receiver.know(replace(shipped, epoch=epoch))
            receiver.ticket(0, [0], session, stream=epoch + 1)
            frame = receiver.next()
            pid, parent = frame.batch()
            parents.add(parent)
            receiver.send(FrameKind.RELEASE, bundle=session)
            wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 5, "the builder is gone")
            assert frame.header.room == 1, "so often was a bundle loaded"
    assert len(parents) == 1, "one template for all epochs"


def test_bundle_replaced_by_its_loader_is_unloaded(connect: Connect, tmp_path: Path):
    def collate(samples: list[torch.Tensor]) -> int:
        return os.getppid()

    with connect() as receiver:
        parents = []
        for epoch in range(3):
            shipped = bundle_of(Squares(epoch + 1), blobs(tmp_path), collate_fn=collate)
            session = receiver.know(replace(shipped, epoch=epoch))
            receiver.ticket(0, [0], session, stream=epoch + 1)
            parents.append(receiver.next().batch())
            receiver.send(FrameKind.RELEASE, bundle=session)
        wait_until(lambda: not Path(f"/proc/{parents[0]}").exists(), 5, "the first template is gone")
        wait_until(lambda: not Path(f"/proc/{parents[1]}").exists(), 5, "the second template is gone")
        assert Path(f"/proc/{parents[2]}").exists()


def test_cancelled_sample_that_hangs_ends_its_process_not_the_feeder(connect: Connect, tmp_path: Path):
    with connect() as receiver:
        bundle = receiver.know(bundle_of(Gated(tmp_path / "never"), blobs(tmp_path)))
        receiver.ticket(0, [0], bundle, flags=Flag.PROBE)
        receiver.ticket(1, [1], bundle)
        assert receiver.next().kind is FrameKind.PROGRESS
        began = time.monotonic()
        receiver.cancel(0)
        told = [receiver.next() for _ in range(2)]
        assert [(f.kind, f.header.ticket) for f in told] == [(FrameKind.CANCELLED, 0), (FrameKind.BODY, 1)]
        assert HUNG_S < time.monotonic() - began < HUNG_S + 3


def test_user_code_runs_in_the_main_thread(connect: Connect, tmp_path: Path):
    class Alarmed(Squares):
        def __getitem__(self, i: int) -> torch.Tensor:
            async def later() -> int:
                await asyncio.sleep(0.01)
                return i

            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.alarm(5)
            signal.alarm(0)
            return torch.tensor([asyncio.run(later()), threading.current_thread() is threading.main_thread()])

    with connect() as receiver:
        receiver.ticket(0, [3], receiver.know(bundle_of(Alarmed(), blobs(tmp_path))))
        assert receiver.next().batch().tolist() == [[3, 1]]


def test_buffer_refilled_by_user_code_changes_no_earlier_batch(connect: Connect, tmp_path: Path):
    class Reused(Squares):
        def __init__(self) -> None:
            super().__init__()
            self.array = torch.zeros(50_000)

        def __getitem__(self, i: int) -> torch.Tensor:
            return self.array.fill_(i)

    with connect() as receiver:
        bundle = receiver.know(bundle_of(Reused(), blobs(tmp_path)))
        for k in range(8):
            receiver.ticket(k, [k], bundle, bare=True)
        for k in range(8):
            assert bool((receiver.next().batch() == k).all())


def test_worker_init_fn_that_ends_its_process_fails_tickets_with_the_cause(connect: Connect, tmp_path: Path):
    shipped = bundle_of(Squares(), blobs(tmp_path), worker_init_fn=lambda _: os.kill(os.getpid(), 9))
    with connect() as receiver:
        receiver.ticket(0, [1], receiver.know(shipped))
        frame = receiver.next()
        assert (frame.kind, frame.header.flags) == (FrameKind.FAILED, Flag.ELSEWHERE)
        told = json.loads(frame.payload)
        assert told["service"] == "ServiceError"
        assert "runs worker_init_fn was killed by SIGKILL, 2 times" in told["message"]


def test_dataset_that_ends_the_loading_process_fails_its_tickets(connect: Connect, tmp_path: Path):
    class Deadly(Squares):
        def __setstate__(self, state: dict[str, object]) -> None:
            os._exit(3)

    with connect() as receiver:
        receiver.ticket(0, [1], receiver.know(bundle_of(Deadly(), blobs(tmp_path))))
        assert "ended while doing so" in json.loads(receiver.next().payload)["message"]
        receiver.ticket(1, [1], receiver.know(bundle_of(Squares(), blobs(tmp_path))))
        assert receiver.next().kind is FrameKind.BODY


def test_worker_init_fn_runs_with_generators_seeded_as_in_torch(connect: Connect, tmp_path: Path):
    seen = tmp_path / "seen"

    def init(worker_id: int) -> None:
        drawn = [torch.initial_seed(), random.random(), float(torch.rand(())), float(np.random.rand())]
        with seen.open("a") as out:
            out.write(json.dumps(drawn) + "\n")

    with connect() as receiver:
        for epoch in range(2):
            shipped = bundle_of(Squares(), blobs(tmp_path), worker_init_fn=init)
            receiver.ticket(
                0, [1], receiver.know(replace(shipped, epoch=epoch)), stream=epoch + 1, base_seed=7
            )
            receiver.next()
    first, second = map(json.loads, seen.read_text().splitlines())
    assert first == second
    assert first[0] == 7
